package nn

import (
	"fmt"

	"gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/program"
	"github.com/euryale-ml/euryale/kernels/fuse"
	"github.com/euryale-ml/euryale/ops"
)

// Slots gives each choice of an expert a place in the queue of that expert, for a mixture of
// experts. Each sample has separate queues, in the order of its choices. A choice beyond the
// capacity of its queue has no slot.
//
//	in   choices  [batch, n...]   Int, 0 to experts-1, such as the indices of [TopK]
//	     gates    [batch, n...]
//	out  slots    [batch, n...]   Int: (choice*batch + sample)*capacity + place in the queue,
//	                              0 where there is no slot
//	     kept     [batch, n...]   gates, 0 where there is no slot
//
// So slots number the rows of [experts, batch, capacity]: [ScatterAdd] moves tokens there, and
// [ByIndices] takes what the experts make of them.
//
// Gradient: dgates is dkept where there is a slot, 0 elsewhere. Choices have none.
// Cost: a pass over [batch, n, experts] for each doubling of n.
// Errors: [ops.ErrShape] if the shapes differ or have one axis; [backend.ErrArgument] if experts or
// capacity is below 1, or there are more than 1<<24 slots or choices of a sample; [ops.ErrDType]; a
// choice out of range has no slot.
// Source: Lepikhin et al., GShard, 2020, whose groups are the samples.
func Slots(experts, capacity int, choices, gates *gorgonia.Node) (slots, kept *gorgonia.Node,
	err error) {
	s := slotsSpec{experts, capacity}
	if slots, err = build("Slots", "choices gates", s, choices, gates); err != nil {
		return nil, nil, err
	}
	kept, err = build("Slots", "choices gates", keptSpec(s), choices, gates)
	return slots, kept, err
}

// slotsSpec are the slots of [Slots].
type slotsSpec struct{ Experts, Capacity int }

// String returns "Slots{8 of 32}".
func (s slotsSpec) String() string { return fmt.Sprintf("Slots{%d of %d}", s.Experts, s.Capacity) }

func (s slotsSpec) dtype(in []tensor.Dtype) (tensor.Dtype, error) {
	_, err := keptSpec(s).dtype(in)
	return tensor.Int, err
}

func (s slotsSpec) shape(in []tensor.Shape) (tensor.Shape, error) {
	if !in[0].Eq(in[1]) || len(in[0]) < 2 {
		return nil, fmt.Errorf("%w: choices have shape %v and gates %v: want (batch, n...) twice",
			ops.ErrShape, in[0], in[1])
	}
	batch := in[0][0]
	const most = 1 << 24 // are exact in Float32
	if s.Experts < 1 || s.Capacity < 1 || s.Experts > most/batch/s.Capacity ||
		in[0].TotalSize() > most {
		return nil, fmt.Errorf("%w: %d experts with %d slots for each of %d samples: use at least "+
			"1, and at most %d together", backend.ErrArgument, s.Experts, s.Capacity, batch, most)
	}
	return in[0].Clone(), nil
}

func (s slotsSpec) gradients([]tensor.Shape) []gradient { return []gradient{{}, {}} }

func (s slotsSpec) program(b *program.Builder, x ...program.Value) program.Value {
	place, fits := s.places(b, x[0])
	shape := b.Of(place).Shape
	sample := b.Cast(backend.F32, b.Locate(0, b.Broadcast(b.Reshape(b.Number(1, place), 1, 1),
		shape[0], 1)))
	choice := b.Cast(backend.F32, b.Reshape(x[0], shape...))
	queue := b.Do(fuse.Add, program.With(b, fuse.Mul, choice, float64(shape[0])), sample)
	slot := b.Do(fuse.Add, program.With(b, fuse.Mul, queue, float64(s.Capacity)), place)
	slot = b.Do(fuse.Where, fits, slot, b.Number(0, slot))
	return b.Reshape(b.Cast(dtypeOn(tensor.Int), slot), b.Of(x[0]).Shape...)
}

// places returns the place of each choice in its queue, [batch, n], and 1 where it has a slot, in
// Float32.
func (s slotsSpec) places(b *program.Builder, choices program.Value) (place, fits program.Value) {
	shape := b.Of(choices).Shape
	batch, n := shape[0], tensor.Shape(shape[1:]).TotalSize()
	full := func(x float64) program.Value {
		number := b.Number(x, b.Cast(backend.F32, choices))
		return b.Broadcast(b.Reshape(number, 1, 1, 1), batch, n, s.Experts)
	}
	chosen := b.Select(2, b.Reshape(choices, batch, n, 1), full(1), full(0))
	counts := b.Do(fuse.Mul, chosen, scan(b, fuse.Add, chosen, 1, false))
	number := b.Reshape(program.Sum(b, counts, 2), batch, n) // from 1 on, 0 out of range
	fits = b.Do(fuse.Mul, program.With(b, fuse.GreaterEqual, number, 1),
		program.With(b, fuse.LessEqual, number, float64(s.Capacity)))
	return program.With(b, fuse.Sub, number, 1), fits
}

// keptSpec are the gates that [Slots] keeps.
type keptSpec struct{ Experts, Capacity int }

// String returns "Kept{8 of 32}".
func (s keptSpec) String() string { return fmt.Sprintf("Kept{%d of %d}", s.Experts, s.Capacity) }

func (s keptSpec) dtype(in []tensor.Dtype) (tensor.Dtype, error) {
	if in[0] != tensor.Int {
		return in[0], fmt.Errorf("%w: choices are %v, not Int", ops.ErrDType, in[0])
	}
	return floats.alike(in, 0)
}

func (s keptSpec) shape(in []tensor.Shape) (tensor.Shape, error) { return slotsSpec(s).shape(in) }

func (s keptSpec) gradients([]tensor.Shape) []gradient {
	return []gradient{{}, {s, []int{0, dy}}}
}

func (s keptSpec) program(b *program.Builder, x ...program.Value) program.Value {
	_, fits := slotsSpec(s).places(b, x[0])
	return b.Do(fuse.Where, b.Reshape(fits, b.Of(x[0]).Shape...), x[1], b.Number(0, x[1]))
}
