package vm_test

import (
	"bytes"
	"encoding/binary"
	"encoding/json"
	"fmt"
	"math"
	"os"
	"slices"
	"strings"
	"testing"

	"gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/testing/require"
	"github.com/euryale-ml/euryale/vm"
)

// onnxGroups are the files of testdata/onnx, and how the operators of each are built. A new group
// is an entry here, one in GROUPS of testdata/onnx/make.py (and one in TORCH, for cases with
// gradients), and a file that this program makes.
var onnxGroups = map[string]onnxKinds{
	"attention": {"Attention": onnxAttention},
	"basics":    basicKinds,
	"images":    imageKinds,
}

// onnxKinds return the nodes of the results of a case, for each operator.
type onnxKinds map[string]func(c *onnxCase) (nodes, error)

// onnxCase is what another implementation computes: testdata/onnx/make.py makes them.
type onnxCase struct {
	Name, Op string
	Attrs    map[string]any
	In, Out  []*onnxTensor // nil where an input is left out
	// DY are weights of the first result, and Grad the gradients of their sum by the inputs; most
	// cases have none.
	DY   *onnxTensor
	Grad []*onnxTensor

	t      *testing.T
	narrow bool // float64 becomes float32
	graph  *gorgonia.ExprGraph
	nodes  []node // of the inputs
}

// onnxTensor has its elements in little endian.
type onnxTensor struct {
	DType string
	Shape []int
	Data  []byte
}

// value returns a tensor of Gorgonia. int64 is Int.
func (c *onnxCase) value(x *onnxTensor) *tensor.Dense {
	t := c.t
	t.Helper()
	n := tensor.Shape(x.Shape).TotalSize()
	var data any
	switch x.DType {
	case "float32":
		data = make([]float32, n)
	case "float64":
		data = make([]float64, n)
	case "int32":
		data = make([]int32, n)
	case "int64":
		data = make([]int64, n)
	case "bool":
		data = make([]bool, n)
	default:
		t.Fatalf("a tensor of %s", x.DType)
	}
	require.NoError(t, binary.Read(bytes.NewReader(x.Data), binary.LittleEndian, data))
	if wide, ok := data.([]float64); ok && c.narrow {
		short := make([]float32, n)
		for i, v := range wide {
			short[i] = float32(v)
		}
		data = short
	}
	if wide, ok := data.([]int64); ok {
		ints := make([]int, n)
		for i, v := range wide {
			ints[i] = int(v)
		}
		data = ints
	}
	if len(x.Shape) == 0 {
		return tensor.New(tensor.FromScalar(first(data)))
	}
	return tensor.New(tensor.WithShape(x.Shape...), tensor.WithBacking(data))
}

// first returns the first element of a slice.
func first(data any) any {
	switch data := data.(type) {
	case []float32:
		return data[0]
	case []float64:
		return data[0]
	case []int32:
		return data[0]
	case []bool:
		return data[0]
	}
	return data.([]int)[0]
}

// input returns a new node with a value.
func (c *onnxCase) input(x *onnxTensor, name string) node {
	var v any = c.value(x)
	if len(x.Shape) == 0 {
		v = c.value(x).Data()
	}
	return gorgonia.NodeFromAny(c.graph, v, gorgonia.WithName(name))
}

// ints returns the elements of input i, integers that parametrise an operation, nil if there is
// none.
func (c *onnxCase) ints(i int) []int {
	c.t.Helper()
	if i >= len(c.In) || c.In[i] == nil {
		return nil
	}
	var list []int
	for _, v := range allNumbers(c.t, c.value(c.In[i])) {
		list = append(list, int(v))
	}
	return list
}

// number returns an attribute, or what it is by default.
func (c *onnxCase) number(name string, otherwise float64) float64 {
	if v, ok := c.Attrs[name].(float64); ok {
		return v
	}
	return otherwise
}

// list returns an attribute that is a list of integers, nil if there is none.
func (c *onnxCase) list(name string) []int {
	var list []int
	numbers, _ := c.Attrs[name].([]any)
	for _, v := range numbers {
		list = append(list, int(v.(float64)))
	}
	return list
}

func (c *onnxCase) int(name string, otherwise int) int {
	return int(c.number(name, float64(otherwise)))
}

// allNumbers returns the elements of a value, in row-major order, as float64.
func allNumbers(t *testing.T, v gorgonia.Value) []float64 {
	t.Helper()
	v = rowMajor(v)
	switch data := v.Data().(type) {
	case []int32:
		var all []float64
		for _, x := range data {
			all = append(all, float64(x))
		}
		return all
	case int32:
		return []float64{float64(data)}
	case bool:
		return map[bool][]float64{true: {1}, false: {0}}[data]
	}
	return floats(t, v)
}

// TestONNX: operations have the results of ONNX's own tests, and the results and gradients of
// torch, in the tape machine, on the host and on a device whose memory the host cannot touch.
func TestONNX(t *testing.T) { testONNX(t, devices) }

func testONNX(t *testing.T, devices map[string]func(testing.TB) backend.Device) {
	for group, kinds := range onnxGroups {
		file := require.Value(os.ReadFile("testdata/onnx/" + group + ".jsonl"))(t)
		for line := range strings.Lines(string(file)) {
			c := &onnxCase{}
			require.NoError(t, json.Unmarshal([]byte(line), c))
			t.Run(fmt.Sprint(group, "/", c.Name), func(t *testing.T) {
				require.That(t, kinds[c.Op] != nil, "nothing builds %s", c.Op)
				for _, c.narrow = range c.widths() {
					c.run(t, kinds[c.Op], "tape", nil)
					for where, device := range devices {
						c.run(t, kinds[c.Op], where, device(t))
					}
				}
			})
		}
	}
}

// widths are the values of narrow: cases of torch, in float64, run in float32, too.
func (c *onnxCase) widths() []bool {
	if c.DY == nil {
		return []bool{false}
	}
	return []bool{false, true}
}

// run builds the graph and runs it three times: in the tape machine, or on a device.
func (c *onnxCase) run(t *testing.T, kind func(c *onnxCase) (nodes, error), where string,
	device backend.Device) {
	t.Helper()
	c.t, c.graph, c.nodes = t, gorgonia.NewGraph(), make([]node, len(c.In))
	for i, x := range c.In {
		if x != nil {
			c.nodes[i] = c.input(x, fmt.Sprint("x", i))
		}
	}
	results, err := kind(c)
	require.NoError(t, err)
	grads := c.gradients(t, results[0])
	var keep nodes
	for _, n := range append(slices.Clone(results), grads...) {
		if n != nil {
			keep = append(keep, n)
		}
	}
	var m gorgonia.VM
	if where == "tape" {
		m = gorgonia.NewTapeMachine(c.graph)
	} else if m, err = vm.New(c.graph, device, vm.Keep(keep...)); err != nil {
		t.Fatal(err)
	}
	defer m.Close()
	for range 3 {
		if err := m.RunAll(); err != nil {
			t.Fatalf("%s: %v", where, err)
		}
		for i, n := range results {
			c.compare(t, fmt.Sprintf("%s: result %d", where, i), n, c.Out[i])
		}
		for i, n := range grads {
			if n != nil {
				c.compare(t, fmt.Sprintf("%s: gradient %d", where, i), n, c.Grad[i])
			}
		}
		m.Reset()
	}
}

// gradients returns the nodes of the gradients of a case.
func (c *onnxCase) gradients(t *testing.T, y node) nodes {
	t.Helper()
	if c.DY == nil {
		return nil
	}
	loss := times(y, c.input(c.DY, "dy"))
	if !loss.IsScalar() {
		loss = sum(loss)
	}
	var by nodes
	for i, g := range c.Grad {
		if g != nil {
			by = append(by, c.nodes[i])
		}
	}
	grads := require.Value(gorgonia.Grad(loss, by...))(t)
	all := make(nodes, len(c.Grad))
	for i, g := range c.Grad {
		if g != nil {
			all[i], grads = grads[0], grads[1:]
		}
	}
	return all
}

// compare compares the value of a node: floats may differ by 1e-5 in float32, by 1e-10 in float64.
func (c *onnxCase) compare(t *testing.T, what string, n node, want *onnxTensor) {
	t.Helper()
	if n.Value() == nil || !slices.Equal(n.Value().Shape(), tensor.Shape(want.Shape)) {
		t.Fatalf("%s is %v, want shape %v", what, n.Value(), want.Shape)
	}
	tolerance := map[string]float64{"float32": 1e-5, "float64": 1e-10}[want.DType]
	if c.narrow {
		tolerance = 1e-5
	}
	got := allNumbers(t, n.Value())
	for i, w := range allNumbers(t, c.value(want)) {
		same := got[i] == w || math.IsNaN(got[i]) && math.IsNaN(w)
		if !same && !(math.Abs(got[i]-w) <= tolerance*max(1, math.Abs(w))) {
			t.Fatalf("%s: element %d is %v, want %v", what, i, got[i], w)
		}
	}
}
