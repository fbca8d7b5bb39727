package autograd

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"

	"gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/group"
	"github.com/euryale-ml/euryale/internal/residence"
	"github.com/euryale-ml/euryale/internal/stock"
)

// inventory is the content of a model: all that its results depend on besides the data of a run.
// New makes it the same on all ranks, Check and Hash cover it, and Save and Load keep it.
//
//   - learnables are the parameters of New, which a solver changes.
//   - frozen are variables that nothing changes: those of WithFrozen.
//   - averages are mean and variance of the batch norms in the graphs of the learnables, which runs
//     change.
//   - random is where the dropouts of these graphs draw from, or what WithRandom was given.
//
// Images, labels and whatever else a program gives to a run are data of each rank, and not part of
// it. A variable looks the same whether it is data or a frozen parameter, so only the program can
// say which it is: see WithFrozen.
type inventory struct {
	learnables []*param
	frozen     []piece
	averages   []piece
	random     Random   // nil for none
	samples    int      // for which an operation draws from it
	byOption   bool     // random was given by WithRandom
	unkept     []string // operations with random numbers that a checkpoint cannot keep
}

// piece is a tensor of the inventory that no solver changes.
type piece struct {
	node   *gorgonia.Node // of a frozen variable
	key    string         // in memory, and in files of format 1
	file   string         // its name in a file
	name   string         // in messages
	shape  []int
	dtype  backend.DType
	memory func() (backend.Buffer, error) // host memory, in row order
}

// The keys of pieces begin with these.
const (
	frozenPrefix  = "frozen."
	averagePrefix = "average."
)

// The names of averages in a file end with these.
const meanSuffix, varianceSuffix = ".running_mean", ".running_var"

// drawing is an operation of package ops/nn.
type drawing interface {
	// Draws returns the Random that the operation draws from, nil for none.
	Draws() any
}

// Random is the source of a model's random numbers, such as the [nn.Random] of dropouts: they
// depend only on a seed, a step, and the number of this rank's first sample.
//
// [nn.Random]: https://pkg.go.dev/github.com/euryale-ml/euryale/ops/nn#Random
type Random interface {
	Seed() uint32
	Step() uint64
	First() int
	Seek(step uint64, first int)
}

// newInventory returns the model of parameters and of what options declare.
func newInventory(params []*param, frozen gorgonia.Nodes, random Random) (v inventory, err error) {
	v.learnables, v.random, v.byOption = params, random, random != nil
	if err = v.freeze(frozen); err != nil {
		return v, fmt.Errorf("WithFrozen: %w", err)
	}
	return v, v.find()
}

// freeze adds variables.
func (v *inventory) freeze(variables gorgonia.Nodes) error {
	for i, n := range variables {
		err := v.freezable(n)
		if err == nil && slices.Index(variables, n) != i {
			err = fmt.Errorf("%w: %s is given twice", backend.ErrArgument, stock.Label(n))
		}
		if err != nil {
			return err
		}
		p, err := frozenPiece(i, n)
		if err != nil {
			return err
		}
		v.frozen = append(v.frozen, p)
	}
	return nil
}

// freezable returns why a node cannot be a frozen parameter.
func (v *inventory) freezable(n *gorgonia.Node) error {
	if n == nil {
		return fmt.Errorf("%w: a variable is nil", backend.ErrArgument)
	}
	why := ""
	switch {
	case n.Op() != nil:
		why = "is the result of an operation, and no variable"
	case slices.ContainsFunc(v.learnables, func(p *param) bool { return p.node == n }):
		why = "is a parameter of New, which a solver changes"
	case n.Value() == nil:
		why = "has no value: bind one with WithInit, WithValue or Let first"
	case residence.Half(n.Dtype()):
		why = "is of 16-bit floats, which stay as they are and may be a file that is mapped: " +
			"leave it out of the checkpoint, and compare models.Model.Fingerprint"
	default:
		return nil
	}
	return fmt.Errorf("%w: %s %s", backend.ErrArgument, stock.Label(n), why)
}

// frozenPiece returns the piece of a variable.
func frozenPiece(i int, n *gorgonia.Node) (piece, error) {
	was, err := hostMemory(n.Value())
	if err != nil {
		return piece{}, fmt.Errorf("%w: %s %w", backend.ErrArgument, stock.Label(n), err)
	}
	return piece{
		node:  n,
		key:   frozenPrefix + strconv.Itoa(i) + "." + n.Name(),
		file:  n.Name(),
		name:  "frozen parameter " + stock.Label(n),
		shape: append([]int{}, n.Shape()...), dtype: was.DType(),
		memory: func() (backend.Buffer, error) {
			now, err := hostMemory(n.Value())
			if err == nil && (now.DType() != was.DType() || now.Len() != was.Len()) {
				err = fmt.Errorf("was bound to another kind of value since New: %v%v",
					now.DType(), n.Value().Shape())
			}
			if err != nil {
				return now, fmt.Errorf("frozen parameter %s %w", stock.Label(n), err)
			}
			return now, nil
		},
	}, nil
}

// declares reports whether a variable is a learnable, or frozen.
func (v *inventory) declares(n *gorgonia.Node) bool {
	return slices.ContainsFunc(v.learnables, func(p *param) bool { return p.node == n }) ||
		slices.ContainsFunc(v.frozen, func(p piece) bool { return p.node == n })
}

// constant reports whether nothing trains a tensor of a file.
func (v *inventory) constant(name string) bool {
	return slices.ContainsFunc(v.frozen, func(p piece) bool { return p.file == name })
}

// hostMemory returns the memory of a value, which must be in row order.
func hostMemory(v gorgonia.Value) (backend.Buffer, error) {
	d, ok := residence.DType(v.Dtype())
	t, dense := v.(*tensor.Dense)
	switch {
	case !ok:
		return backend.Buffer{}, fmt.Errorf("is a tensor of %v, which is not supported", v.Dtype())
	case dense && !residence.RowMajor(t):
		return backend.Buffer{}, errors.New("is a view or transposed: its value must be contiguous")
	}
	memory, err := residence.Memory(v, d)
	if err != nil {
		return memory, fmt.Errorf("cannot be read: %w", err)
	}
	memory = memory.Slice(0, v.Shape().TotalSize())
	return memory, residence.Present(memory)
}

// find looks for averages and random numbers in the graphs of the learnables. Where hooks are
// used, graphs grow after New. After an error all is as it was.
func (v *inventory) find() error {
	var nodes gorgonia.Nodes
	for _, p := range v.learnables {
		nodes = append(nodes, p.node)
	}
	return v.findIn(nodes)
}

// findIn is find in the graphs of nodes.
func (v *inventory) findIn(nodes gorgonia.Nodes) error {
	was := *v
	v.averages, v.unkept = nil, nil
	if !v.byOption {
		v.random = nil
	}
	seen := map[any]bool{}
	for _, n := range nodes {
		g := n.Graph()
		if seen[g] {
			continue
		}
		seen[g] = true
		for _, a := range stock.AveragesOf(g) {
			if err := v.average(a, seen); err != nil {
				*v = was
				return err
			}
		}
		for _, n := range g.AllNodes() {
			v.draw(n)
		}
	}
	return nil
}

// average adds the averages of a batch norm, unless they are among those seen. They begin as those
// of PyTorch, so that a model which nothing has trained is saved with them.
func (v *inventory) average(a stock.Averages, seen map[any]bool) error {
	mean, variance := a.Stats()
	if seen[mean] {
		return nil
	}
	seen[mean] = true
	if err := stock.Begin(a); err != nil {
		return err
	}
	for i, t := range []tensor.Tensor{mean, variance} {
		memory, err := hostMemory(t)
		name := []string{"mean", "variance"}[i]
		if err != nil {
			return fmt.Errorf("the moving %s of batch norm %s %w", name, a.Name, err)
		}
		file := a.Name + []string{meanSuffix, varianceSuffix}[i]
		v.averages = append(v.averages, piece{
			key:   averagePrefix + file,
			file:  file,
			name:  fmt.Sprintf("moving %s of batch norm %s", name, a.Name),
			shape: append([]int{}, t.Shape()...), dtype: memory.DType(),
			memory: func() (backend.Buffer, error) { return memory, nil },
		})
	}
	return nil
}

// draw notes where an operation gets its random numbers, and for how many samples.
func (v *inventory) draw(n *gorgonia.Node) {
	op := n.Op()
	if d, ok := op.(drawing); ok {
		r, ok := d.Draws().(Random)
		if ok && n.Dims() > 0 && v.samples == 0 {
			v.samples = n.Shape()[0]
		}
		switch {
		case !ok || r == v.random:
		case v.random == nil:
			v.random = r
		default:
			v.lose(op)
		}
		return
	}
	switch stock.Name(op) {
	case "dropoutOp", "randomOp":
		v.lose(op)
	}
}

// lose notes an operation whose random numbers no checkpoint keeps.
func (v *inventory) lose(op gorgonia.Op) {
	if name := fmt.Sprint(op); !slices.Contains(v.unkept, name) {
		v.unkept = append(v.unkept, name)
	}
}

// pieces returns all tensors that no solver changes.
func (v *inventory) pieces() []piece { return slices.Concat(v.frozen, v.averages) }

// String lists what ranks must have in common besides the learnables, a line for each.
func (v *inventory) String() string {
	var s strings.Builder
	if v.random != nil {
		fmt.Fprintf(&s, "%s\n", v.randomState())
	}
	for _, p := range v.pieces() {
		fmt.Fprintf(&s, "%s is %v%v\n", p.name, p.dtype, p.shape)
	}
	return s.String()
}

// bytesOf returns the elements of pieces, one after the other.
func bytesOf(pieces []piece) ([]byte, error) {
	var all []byte
	for _, p := range pieces {
		memory, err := p.memory()
		if err != nil {
			return nil, err
		}
		all = append(all, memory.Bytes()...)
	}
	return all, nil
}

// fill gives pieces their contents of n bytes, and leaves those that have none as they are.
func fill(pieces []piece, of func(p piece, n int) []byte) error {
	for _, p := range pieces {
		memory, err := p.memory()
		if err != nil {
			return err
		}
		residence.Write(memory, backend.Of(of(p, memory.NBytes())))
	}
	return nil
}

// randomState returns what a checkpoint keeps of random numbers, nil for none.
func (v *inventory) randomState() *randomState {
	if v.random == nil {
		return nil
	}
	return &randomState{v.random.Seed(), v.random.Step(), !v.byOption}
}

// randomStep returns the randomStep of the random numbers, nothing without any.
func (v *inventory) randomStep() []byte {
	if v.random == nil {
		return nil
	}
	return binary.LittleEndian.AppendUint64(nil, v.random.Step())
}

// share gives all ranks what rank 0 has besides the learnables, and random numbers of their own.
func (v *inventory) share(comm backend.Communicator) error {
	if r, ok := v.random.(interface{ Place(first int) }); ok && v.samples > 0 {
		r.Place(comm.Rank() * v.samples)
	}
	note, err := bytesOf(v.pieces())
	if err != nil {
		return err
	}
	note = append(note, v.randomStep()...)
	if len(note) == 0 || comm.Size() == 1 {
		return nil
	}
	all := make([]byte, len(note))
	comm = backend.Label(comm, backend.ForNew)
	c := backend.Collective{Kind: backend.Broadcast}
	if err := group.RunOnHost(comm, c, backend.Of(all), backend.Of(note)); err != nil {
		return fmt.Errorf("frozen parameters and running statistics: %w", err)
	}
	if v.random != nil {
		at := len(all) - 8
		if step := binary.LittleEndian.Uint64(all[at:]); step != v.random.Step() {
			v.random.Seek(step, v.random.First())
		}
	}
	at := 0
	return fill(v.pieces(), func(_ piece, n int) []byte {
		at += n
		return all[at-n : at]
	})
}

// merge replaces the averages of each rank by their mean over all ranks, added in rank order in
// float64. A running statistic is linear in what it averages, so this is the running statistic of
// the ranks' mean, whenever it is taken.
func (v *inventory) merge(comm backend.Communicator) error {
	if len(v.averages) == 0 || comm.Size() == 1 {
		return nil
	}
	note, err := bytesOf(v.averages)
	if err != nil {
		return err
	}
	notes, err := group.OverComm(comm)(note)
	if err != nil {
		return fmt.Errorf("running statistics of batch norms: %w", err)
	}
	if !slices.ContainsFunc(notes, func(n []byte) bool { return !bytes.Equal(n, note) }) {
		return nil
	}
	at := 0
	for _, p := range v.averages {
		memory, err := p.memory()
		if err != nil {
			return err
		}
		end := at + memory.NBytes()
		if p.dtype == backend.F32 {
			meanOf[float32](memory, notes, at, end)
		} else {
			meanOf[float64](memory, notes, at, end)
		}
		at = end
	}
	return nil
}

// meanOf writes the mean of the values that the notes have between two bytes.
func meanOf[T float32 | float64](to backend.Buffer, notes [][]byte, from, end int) {
	sums := make([]float64, to.Len())
	part := residence.Zeros(to.DType(), to.Len())
	for _, note := range notes {
		copy(part.Bytes(), note[from:end])
		for i, x := range backend.View[T](part) {
			sums[i] += float64(x)
		}
	}
	mean := backend.View[T](to)
	for i, s := range sums {
		mean[i] = T(s / float64(len(notes)))
	}
}

// store adds the pieces to what a checkpoint has.
func (v *inventory) store(tensors map[string]stored) error {
	for _, p := range v.pieces() {
		memory, err := p.memory()
		if err != nil {
			return err
		}
		tensors[p.key] = stored{Shape: p.shape, Data: memory}
	}
	return nil
}

// rest returns all items but the learnables.
func (v *inventory) rest() (all []item) {
	for _, p := range v.pieces() {
		all = append(all, item{p.name, func() ([]byte, error) {
			memory, err := p.memory()
			return memory.Bytes(), err
		}})
	}
	if r := v.random; r != nil {
		all = append(all, item{"the seed or the step of random numbers", func() ([]byte, error) {
			return binary.LittleEndian.AppendUint64(v.randomStep(), uint64(r.Seed())), nil
		}})
	}
	return all
}
