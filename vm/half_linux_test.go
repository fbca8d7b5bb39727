package vm_test

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"unsafe"

	"gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/euryale-ml/euryale/autograd/solver"
	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/kernels/simd"
	"github.com/euryale-ml/euryale/internal/testing/require"
	"github.com/euryale-ml/euryale/ops/nn"
	"github.com/euryale-ml/euryale/vm"
)

// ofFile returns the matrix of 0, 1, 2 ... of 16-bit floats, in a file that is mapped and that
// nobody can write.
func ofFile(t *testing.T, dt tensor.Dtype, rows, columns int) *tensor.Dense {
	t.Helper()
	var bits []byte
	for i := range rows * columns {
		x := simd.NarrowBF16(float32(i))
		if dt == float16 {
			x = simd.NarrowF16(float32(i))
		}
		bits = append(bits, byte(x), byte(x>>8))
	}
	name := filepath.Join(t.TempDir(), "weights")
	require.NoError(t, os.WriteFile(name, bits, 0o400))
	file := require.Value(os.Open(name))(t)
	defer file.Close()
	mapped := require.Value(syscall.Mmap(int(file.Fd()), 0, len(bits), syscall.PROT_READ,
		syscall.MAP_SHARED))(t)
	t.Cleanup(func() { require.NoError(t, syscall.Munmap(mapped)) })
	return tensor.New(tensor.Of(dt), tensor.WithShape(rows, columns),
		tensor.FromMemory(uintptr(unsafe.Pointer(&mapped[0])), uintptr(len(mapped))))
}

// halfModel is a graph of y = x wᵀ, with x of 1, 2, 3, 4 and w of 16 bits [out, in], as files have
// it, and of rows of w.
type halfModel struct {
	model
	w, y, rows node
}

func newHalfModel(t *testing.T, dt tensor.Dtype) *halfModel {
	t.Helper()
	m := &halfModel{model: model{g: gorgonia.NewGraph()}}
	m.w = gorgonia.NewTensor(m.g, dt, 2, gorgonia.WithShape(3, 2), gorgonia.WithName("w"),
		gorgonia.WithValue(ofFile(t, dt, 3, 2)))
	x := tensor.New(tensor.WithShape(2, 2), tensor.WithBacking([]float32{1, 2, 3, 4}))
	list := tensor.New(tensor.WithShape(2), tensor.WithBacking([]int{2, 0}))
	wide := must(nn.Cast(tensor.Float32, m.w))
	m.y = mul(gorgonia.NodeFromAny(m.g, x, gorgonia.WithName("x")),
		must(gorgonia.Transpose(wide)))
	m.rows = must(nn.Embedding(wide, gorgonia.NodeFromAny(m.g, list, gorgonia.WithName("list"))))
	return m
}

// A plan of BF16 reads weights of BF16 where they lie, transposed or not, and any plan takes rows
// of them. Nothing writes them, which would end the process here.
func TestWeightsOf16BitsAreReadWhereTheyLie(t *testing.T) {
	for name, device := range map[string]backend.Device{"host": nil, "fake": fake(t)} {
		for _, dt := range []tensor.Dtype{bfloat16, float16} {
			for _, precision := range []vm.Precision{vm.F32, vm.TF32, vm.BF16} {
				for _, frozen := range []bool{true, false} {
					what := fmt.Sprintf("%s, %v in %v, frozen: %v", name, dt, precision, frozen)
					halfTrial(t, what, device, dt, precision, frozen)
				}
			}
		}
	}
}

func halfTrial(t *testing.T, what string, device backend.Device, dt tensor.Dtype,
	precision vm.Precision, freeze bool) {
	t.Helper()
	m := newHalfModel(t, dt)
	options := []vm.Option{vm.WithPrecision(precision), vm.Keep(m.y, m.rows)}
	if freeze {
		options = append(options, vm.WithFrozen(m.w))
	}
	machine := machineOn(t, device, m.g, options...)
	for range 2 {
		run(t, machine)
		require.Slices(t, what, floats(t, m.y.Value()), []float64{2, 8, 14, 4, 18, 32})
		require.Slices(t, what, floats(t, m.rows.Value()), []float64{4, 5, 0, 1})
		require.NoError(t, machine.Pull())
	}
	text := machine.Plan().String()
	if casts := strings.Contains(text, "cast of w "); dt == bfloat16 && precision == vm.BF16 {
		require.Check(t, !casts, "%s: w is cast:\n%s", what, text)
	}
	require.Check(t, strings.Contains(text, "gather axis 0 of w "), "%s: no rows of w:\n%s", what,
		text)
	require.NoError(t, machine.Close())
}

// What would train 16-bit floats, or compute with them, is refused: each by its name.
func TestWeightsOf16BitsAreNotTrained(t *testing.T) {
	m := newHalfModel(t, bfloat16)
	_, err := gorgonia.Grad(must(gorgonia.Sum(m.y)), m.w)
	require.Check(t, err != nil, "there is a gradient")
	_, err = vm.New(m.g, nil, vm.WithSolver(&solver.SGD{Rate: 1}, m.w))
	require.Fails(t, "WithSolver", err, backend.ErrUnsupported, "w is BFloat16", "16-bit floats")
	must(gorgonia.Sum(m.w))
	_, err = vm.New(m.g, nil)
	require.Fails(t, "a sum", err, "w", "nn.Cast(tensor.Float32, x)")
}
