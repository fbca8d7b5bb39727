package interpret

import (
	"fmt"
	"slices"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/vm/ir"
)

// Ranks are programs that ranks run together: each is evaluated as far as values are wanted.
type Ranks struct {
	Programs []*ir.Program
	Outside  []Outside
	values   map[[2]int]Array // by rank and place in its program
}

// Value returns a value of a rank.
func (r *Ranks) Value(rank int, id ir.ID) (y Array, err error) {
	y, ok := r.values[[2]int{rank, int(id)}]
	if ok {
		return y, nil
	}
	v, args := r.Programs[rank].Values[id], []Array(nil)
	switch v.Op.(type) {
	case ir.AllReduce:
		y, err = r.Sum(v)
	case ir.AllGather:
		args, err = r.operands(v.Op)
		y.Shape = v.Shape
		for _, x := range args {
			y.Data = append(y.Data, x.Data...)
		}
	default:
		if args, err = r.args(rank, v); err == nil {
			y, err = evaluate(v, args, r.Outside[rank])
		}
	}
	if err != nil {
		return y, fmt.Errorf("rank %d: value %d, %v of %s: %w", rank, id, v.Op, v.Name, err)
	}
	if r.values == nil {
		r.values = map[[2]int]Array{}
	}
	r.values[[2]int{rank, int(id)}] = y
	return y, nil
}

func (r *Ranks) args(rank int, v ir.Value) (all []Array, err error) {
	for _, a := range v.Args {
		x, err := r.Value(rank, a)
		if err != nil {
			return nil, err
		}
		all = append(all, x)
	}
	return all, nil
}

// operands returns those that an operation has on all ranks.
func (r *Ranks) operands(op ir.Op) (all []Array, err error) {
	for rank, p := range r.Programs {
		at := slices.IndexFunc(p.Values, func(v ir.Value) bool { return v.Op == op })
		if at < 0 {
			return nil, fmt.Errorf("rank %d has no %v", rank, op)
		}
		args, err := r.args(rank, p.Values[at])
		if err != nil {
			return nil, err
		}
		all = append(all, args...)
	}
	return all, nil
}

// Sum adds up the operands that the operation of a value has on all ranks.
func (r *Ranks) Sum(v ir.Value) (Array, error) {
	all, err := r.operands(v.Op)
	if err != nil {
		return Array{}, err
	}
	sums := in(v.DType).sums(v.Shape)
	for _, x := range all {
		for i, e := range x.Data {
			sums[i].add(e)
		}
	}
	return results(v.Shape, sums), nil
}

// kept returns what comes from the runs before, or is a number of the step.
func (o Outside) kept(v ir.Value) (Array, error) {
	x, ok := o.Kept[v.Op]
	if !ok {
		return Array{}, fmt.Errorf("%w: nothing is kept for it", backend.ErrArgument)
	}
	if _, number := v.Op.(ir.Setting); number {
		return Array{Shape: v.Shape, Data: slices.Repeat(x.Data, v.Shape.Size())}, nil
	}
	return Array{Shape: v.Shape, Data: x.Data}, nil
}
