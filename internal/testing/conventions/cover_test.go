package conventions

import (
	"go/ast"
	"go/parser"
	"go/token"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/euryale-ml/euryale/internal/testing/require"
)

// without are the operations that need no case, and why.
var without = map[string]string{
	// only move elements
	"nn.Slice": "moves", "nn.Split": "moves", "nn.Concat": "moves", "Slice": "moves", "At": "moves",
	"Concat": "moves", "Unconcat": "moves", "Reshape": "moves", "Ravel": "moves",
	"Transpose": "moves", "KeepDims": "moves", "DiagFlat": "moves", "SizeOf": "moves",
	"Im2Col": "moves", "Upsample2D": "moves", "ByIndices": "as nn.ByIndices",
	// draw numbers, or number slots
	"nn.Dropout": "draws", "Dropout": "draws", "UniformRandomNode": "draws",
	"GaussianRandomNode": "draws", "BinomialRandomNode": "draws", "nn.Slots": "counts",
	// are undefined in PyTorch where numbers are not finite
	"nn.Cast": "undefined", "ConvType": "undefined",
	// have wrong gradients in every graph, as the table of operations says
	"Log2": "wrong", "InverseSqrt": "wrong", "LogSumExp": "wrong", "OuterProd": "wrong",
	// run Gorgonia's own code
	"Sparsemax": "Gorgonia's", "CTCLoss": "Gorgonia's",
	// are made of others
	"Auto": "of others", "Div": "HadamardDiv", "BatchedMatMul": "nn.BatchedMatMul",
	"Tensordot": "Mul", "ReduceAdd": "Add", "ReduceMul": "HadamardProd", "Conv2d": "nn.Conv2D",
	"Conv1d": "nn.Conv2D", "MaxPool1D": "MaxPool2D", "AveragePool1D": "nn.AvgPool2D",
	"AveragePool2D": "nn.AvgPool2D", "GlobalAveragePool2D": "nn.GlobalAvgPool2D",
	"nn.Grad": "no operation",
}

// TestEveryOperationHasACase: of Gorgonia's, those of docs/ops.md, and of package nn every function
// that makes a node. Those with options have a case with their zero value.
func TestEveryOperationHasACase(t *testing.T) {
	cases, _, err := Cases()
	require.NoError(t, err)
	has := map[string]bool{}
	for _, c := range cases {
		has[c.name()] = true
	}
	for _, name := range append(nnOperations(t), stockOperations(t)...) {
		like := strings.TrimPrefix(name, "Broadcast") // repeats operands
		if why := without[name]; !has[name] && !has[like] && why == "" {
			t.Errorf("%s is in no case of pytorch.py", name)
		} else if has[name] && why != "" {
			t.Errorf("%s needs no case (%s), and has one", name, why)
		}
	}
}

// nnOperations are the functions of package nn that return nodes.
func nnOperations(t *testing.T) (names []string) {
	t.Helper()
	files := require.Value(filepath.Glob("../../../ops/nn/*.go"))(t)
	for _, file := range files {
		if strings.HasSuffix(file, "_test.go") {
			continue
		}
		parsed, err := parser.ParseFile(token.NewFileSet(), file, nil, parser.SkipObjectResolution)
		require.NoError(t, err)
		for _, d := range parsed.Decls {
			f, ok := d.(*ast.FuncDecl)
			if ok && f.Recv == nil && f.Name.IsExported() && makesNodes(f.Type.Results) {
				names = append(names, "nn."+f.Name.Name)
			}
		}
	}
	require.Check(t, len(names) >= 40, "there are %d operations in package nn", len(names))
	return names
}

func makesNodes(results *ast.FieldList) bool {
	if results == nil {
		return false
	}
	of := results.List[0].Type
	if p, ok := of.(*ast.StarExpr); ok {
		of = p.X
	}
	s, ok := of.(*ast.SelectorExpr)
	return ok && (s.Sel.Name == "Node" || s.Sel.Name == "Nodes")
}

// stockOperations are Gorgonia's operations in the tables of docs/ops.md before those of several
// operations.
func stockOperations(t *testing.T) (names []string) {
	t.Helper()
	page := require.Value(os.ReadFile("../../../docs/ops.md"))(t)
	tables, _, _ := strings.Cut(string(page), "\n## Different operations")
	first := regexp.MustCompile("(?m)^\\| `(\\w+)` \\|")
	for _, row := range first.FindAllStringSubmatch(tables, -1) {
		names = append(names, row[1])
	}
	require.Check(t, len(names) >= 80, "there are %d operations in docs/ops.md", len(names))
	return names
}
