package autograd

import (
	"encoding/binary"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"

	"gorgonia.org/gorgonia"

	"github.com/euryale-ml/euryale/autograd/internal/checkpoint"
	"github.com/euryale-ml/euryale/autograd/solver"
	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/group"
	"github.com/euryale-ml/euryale/internal/residence"
)

// WithParts declares that some parameters are parts of larger ones that the ranks of comm divide:
// tensor parallelism. axes has the axis along which each is divided, by the name of its node; all
// other parameters are the same on all ranks of comm. Parts may have different lengths, and are in
// rank order.
//
//	vm.WithDataParallel(data, autograd.WithParts(tensor, map[string]int{"w": 0}))
//
// For graphs of package layers use layers.Builder.Training, which has it.
//
// A checkpoint has the whole parameters and the whole state of the solver, in shards of all ranks
// if the data-parallel ranks divide them (vm.WithShards). Ranks with other parts, or with no parts,
// can load it. [DataParallel.Hash] covers the whole model, and the norm of vm.ClipNorm counts each
// element once. [DataParallel.Check] also compares what is the same on all ranks of comm.
//
// The ranks of comm have the same rank in the communicator of New. New, Save, Load, Check and Hash
// are collective over both communicators. comm must stay open until Close.
//
// Errors: ErrArgument for a name that no parameter has, or an axis that it does not have;
// [backend.ErrMismatch] if ranks of comm have other parameters. If comm has more than one rank,
// Save and Load return ErrUnsupported with a compression that keeps residuals, and with solvers of
// other packages.
func WithParts(comm backend.Communicator, axes map[string]int) Option {
	return func(o *options) {
		o.once("WithParts")
		if o.refuseNil("WithParts", "comm", comm); o.missing == nil {
			o.parts = &parts{comm: comm, axes: axes}
		}
	}
}

// parts are what the ranks of a communicator have of the parameters that they divide. Methods may
// be called on nil: nothing is divided.
type parts struct {
	comm backend.Communicator
	axes map[string]int
	// of the ranks' parts along the axis, by parameter; nil for one that is not divided
	lengths [][]int
}

// divides reports whether ranks have parts of a parameter.
func (s *parts) divides(p *param) bool {
	if s == nil {
		return false
	}
	_, divided := s.axes[p.name]
	return divided
}

// whole returns nil where one rank has all parts.
func (s *parts) whole() *parts {
	if s != nil && s.comm.Size() == 1 {
		return nil
	}
	return s
}

// connect finds what the ranks have, or returns an error on all of them if one has a problem.
func (s *parts) connect(params []*param, problem error) error {
	if s == nil {
		return problem
	}
	var text strings.Builder
	if problem == nil {
		problem = s.describe(&text, params)
	}
	labelled := backend.Label(s.comm, backend.ForNew)
	if err := agreeOnParams(labelled, text.String(), params, problem); err != nil {
		return err
	}
	var note []byte
	for _, p := range params {
		if axis, divided := s.axes[p.name]; divided {
			note = binary.LittleEndian.AppendUint64(note, uint64(p.shape[axis]))
		}
	}
	s.lengths = make([][]int, len(params))
	if note == nil {
		return nil
	}
	notes, err := group.OverComm(s.comm)(note)
	if err != nil {
		return err
	}
	at := 0
	for i, p := range params {
		if _, divided := s.axes[p.name]; !divided {
			continue
		}
		for _, note := range notes {
			s.lengths[i] = append(s.lengths[i], int(binary.LittleEndian.Uint64(note[at:])))
		}
		at += 8
	}
	return nil
}

// describe writes what the ranks must have in common, or returns why the parameters cannot be
// parts.
func (s *parts) describe(text *strings.Builder, params []*param) error {
	found := map[string]bool{}
	for _, p := range params {
		axis, divided := s.axes[p.name]
		dims := p.dims()
		if divided {
			if axis < 0 || axis >= len(dims) || found[p.name] {
				return fmt.Errorf("WithParts: %w: axis %d of parameter %v: it must be one of its "+
					"axes, and the name that of one parameter", backend.ErrArgument, axis, p)
			}
			dims = slices.Delete(dims, axis, axis+1)
		}
		found[p.name] = true
		fmt.Fprintf(text, "parameter %s is %v%v, divided along an axis: %v (%d)\n", p.name, p.dtype,
			dims, divided, axis)
	}
	for _, name := range slices.Sorted(maps.Keys(s.axes)) {
		if !found[name] {
			return fmt.Errorf("WithParts: %w: there is no parameter %q", backend.ErrArgument, name)
		}
	}
	return nil
}

// first reports whether this rank does the work that one rank does for all parts.
func (s *parts) first() bool { return s == nil || s.comm.Rank() == 0 }

// size returns how many ranks have parts.
func (s *parts) size() int {
	if s == nil {
		return 1
	}
	return s.comm.Size()
}

// divided reports whether a parameter is a part.
func (s *parts) divided(param int) bool { return s != nil && s.lengths[param] != nil }

// join returns the whole of this rank's part of a parameter, or of what belongs to it element by
// element. It is collective.
func (s *parts) join(p *param, mine backend.Buffer) (stored, error) {
	regions := make([]checkpoint.Region, s.comm.Size())
	for r := range regions {
		regions[r] = s.regionOf(p, r)
	}
	whole, err := joined(s.comm, p.dtype, regions, mine)
	return stored{Shape: regions[0].Shape, Data: whole}, err
}

// joined returns the whole tensor of which the ranks have these regions. Ranks send the same number
// of bytes.
func joined(comm backend.Communicator, d backend.DType, regions []checkpoint.Region,
	mine backend.Buffer) (backend.Buffer, error) {
	most, size := 0, d.Size()
	for _, r := range regions {
		most = max(most, r.N)
	}
	note := make([]byte, most*size)
	copy(note, mine.Bytes())
	notes, err := group.OverComm(comm)(note)
	if err != nil {
		return backend.Buffer{}, err
	}
	all := checkpoint.All(regions[0].Shape)
	whole := residence.Zeros(d, all.N)
	for r, note := range notes {
		regions[r].Meet(all, func(from, to, n int) {
			copy(whole.Bytes()[to*size:(to+n)*size], note[from*size:])
		})
	}
	return whole, nil
}

// regionOf returns what a rank has of a parameter.
func (s *parts) regionOf(p *param, rank int) checkpoint.Region {
	if !s.divided(p.index) {
		return checkpoint.All(p.dims())
	}
	axis, lengths := s.axes[p.name], s.lengths[p.index]
	r := checkpoint.Region{Axis: axis, Shape: p.dims(), Length: lengths[rank]}
	r.Shape[axis] = 0
	for i, n := range lengths {
		r.Shape[axis] += n
		if i < rank {
			r.Start += n
		}
	}
	r.N = r.Length * checkpoint.Elements(r.Shape) / r.Shape[axis]
	return r
}

// wholeState returns the whole of the state that this rank would write, by key, unless a rank has a
// problem. It is collective.
func (d *contents) wholeState(state map[string]stored, by gorgonia.Solver, problem error) (
	map[string]stored, error) {
	s := d.parts
	if s == nil {
		return state, problem
	}
	_, err := group.Alike(s.comm, "", nil, errors.Join(problem, d.divides(by)))
	if err != nil {
		return nil, err
	}
	of := map[string]*param{}
	for _, n := range d.tensors(by) {
		of[n.key] = n.of
	}
	for _, key := range slices.Sorted(maps.Keys(state)) {
		p := of[key]
		if p == nil || !s.divided(p.index) {
			continue
		}
		whole, err := s.join(p, state[key].Data)
		if err != nil {
			return nil, err
		}
		if len(state[key].Shape) != len(p.shape) { // the solver's have one axis
			whole.Shape = []int{whole.Data.Len()}
		}
		state[key] = whole
	}
	return state, nil
}

// divides returns an error for a state that ranks cannot divide, where they divide it.
func (d *contents) divides(by gorgonia.Solver) (err error) {
	if d.parts == nil && !d.sharded {
		return nil
	}
	if _, ok := d.compression(); ok {
		err = fmt.Errorf("%w: WithParts: the residuals of a compression belong to parts: "+
			"checkpoints cannot keep them, use f16 or bf16", backend.ErrUnsupported)
	}
	_, ours := solver.VectorNames(by, 0)
	if _, vanilla := by.(*gorgonia.VanillaSolver); !ours && !vanilla {
		err = errors.Join(fmt.Errorf("%w: what a %T keeps cannot be divided: use a solver of "+
			"package solver", backend.ErrUnsupported, by), err)
	}
	return err
}

// Parts returns the communicator whose ranks divide the parameters, nil without [WithParts], and
// whether each parameter is a part.
func (x *Buckets) Parts() (comm backend.Communicator, divided []bool) {
	s := x.d.parts
	if s == nil || !slices.ContainsFunc(s.lengths, func(l []int) bool { return l != nil }) {
		return nil, nil
	}
	divided = make([]bool, len(x.d.params))
	for i := range divided {
		divided[i] = s.divided(i)
	}
	return s.comm, divided
}

// check returns an error if anything that must be the same on all ranks with other parts is not.
func (s *parts) check(params []*param, rest []item) error {
	if s == nil {
		return nil
	}
	same := slices.DeleteFunc(slices.Clone(params), func(p *param) bool {
		return s.divided(p.index)
	})
	comm := backend.Label(s.comm, backend.ForCheck)
	return alikeOn(comm, slices.Concat(items(same), rest), nil)
}
