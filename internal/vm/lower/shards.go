package lower

import (
	"fmt"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/vm/ir"
)

// fullyShard returns the program in which this rank has its shards alone of some variables, and
// gathers them (ZeRO stage 3; FSDP: Zhao et al., arXiv:2304.11277). Where the program reads a
// variable in BF16 alone, and its [Shard] says so, ranks gather that.
//
//	w       = AllGather(shard of w)
//	Cast(w) = AllGather(shard of w) in BF16
func fullyShard(p *ir.Program, updates []Update) (*ir.Program, error) {
	sharded := map[ir.Op]int{} // the update, by variable
	for i, u := range updates {
		if u.Shard.FullySharded() {
			sharded[ir.Input{Index: u.Input}] = i
		}
	}
	if len(sharded) == 0 {
		return p, nil
	}
	q, to := &ir.Program{}, make([]ir.ID, len(p.Values))
	halved := func(id ir.ID) bool {
		update, variable := sharded[p.Values[id].Op]
		return variable && updates[update].Shard.Half
	}
	for i, v := range p.Values {
		update, variable := sharded[v.Op]
		switch s := updates[update].Shard; {
		case variable:
			shard := v
			shard.Shape = ir.Of(s.To - s.From)
			v.Op, v.DType = ir.AllGather{Index: update}, s.Unsharded(v.DType)
			if !s.Empty() {
				v.Args = []ir.ID{q.Add(shard)}
			}
		case v.Op == (ir.Cast{}) && v.DType == backend.BF16 && halved(v.Args[0]):
			to[i] = to[v.Args[0]]
			continue
		default:
			for _, a := range v.Args {
				if halved(a) {
					return nil, fmt.Errorf("lower: %v of %s reads %s, which ranks gather in BF16",
						v.Op, v.Name, p.Values[a].Name)
				}
			}
			v.Args = mapped(v.Args, to)
		}
		to[i] = q.Add(v)
	}
	q.Results = mapped(p.Results, to)
	return q, nil
}
