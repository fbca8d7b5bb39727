package nn

import (
	"testing"

	"gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/euryale-ml/euryale/internal/testing/nilargs"
)

func TestNilArgumentsAreErrors(t *testing.T) {
	g := gorgonia.NewGraph()
	n := func(name string, shape ...int) *gorgonia.Node {
		return gorgonia.NewTensor(g, tensor.Float32, len(shape), gorgonia.WithShape(shape...),
			gorgonia.WithName(name))
	}
	vector, matrix, four := n("v", 2), n("m", 2, 2), n("x", 1, 1, 2, 2)
	indices := gorgonia.NewVector(g, tensor.Int, gorgonia.WithShape(2), gorgonia.WithName("i"))
	ones := [2]int{1, 1}
	nilargs.Check(t, map[string]nilargs.Use{
		"ArgMax":          {F: ArgMax, Args: []any{0, false, matrix}},
		"ArgMin":          {F: ArgMin, Args: []any{0, false, matrix}},
		"Attention":       {F: Attention, Args: []any{four, four, four, AttentionOptions{}}},
		"AvgPool2D":       {F: AvgPool2D, Args: []any{ones, [2]int{}, ones, four}},
		"BatchedMatMul":   {F: BatchedMatMul, Args: []any{false, false, four, four}},
		"ByIndices":       {F: ByIndices, Args: []any{0, matrix, indices}},
		"Concat":          {F: Concat, Args: []any{0, vector}},
		"CrossEntropy":    {F: CrossEntropy, Args: []any{NoLabel, matrix, indices}},
		"Dropout":         {F: Dropout, Args: []any{0.5, NewRandom(1), vector}},
		"Embedding":       {F: Embedding, Args: []any{matrix, indices}},
		"GELU":            {F: GELU, Args: []any{vector}},
		"GELUTanh":        {F: GELUTanh, Args: []any{vector}},
		"GlobalAvgPool2D": {F: GlobalAvgPool2D, Args: []any{four}},
		"GatherElements":  {F: GatherElements, Args: []any{0, vector, indices}},
		"Grad":            {F: Grad, Args: []any{gorgonia.Must(gorgonia.Sum(vector)), vector}},
		"LayerNorm":       {F: LayerNorm, Args: []any{0.5, matrix, vector, vector}},
		"LogSoftMax":      {F: LogSoftMax, Args: []any{0, vector}},
		"Norm":            {F: Norm, Args: []any{3, 0, vector}},
		"OuterProd":       {F: OuterProd, Args: []any{vector, vector}},
		"ScatterAdd":      {F: ScatterAdd, Args: []any{0, 3, vector, indices}},
		"Slice":           {F: Slice, Args: []any{0, 0, 1, 1, vector}},
		"SoftMax":         {F: SoftMax, Args: []any{0, vector}},
		"Split":           {F: Split, Args: []any{0, []int{1, 1}, vector}},
		"TopK":            {F: TopK, Args: []any{0, 1, vector}},
	}, map[string]string{"Defects": "it returns none"})
	if found := Defects(nil); found != nil {
		t.Errorf("nil has defects: %v", found)
	}
}
