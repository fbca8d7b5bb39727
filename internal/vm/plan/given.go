package plan

import "slices"

// Given returns the plan of one result without memory for that, which is bound before a run as
// settings are, and its buffer: -1 if the result lies in memory in another way, and must be copied.
func (p *Plan) Given() (*Plan, int) {
	bare, r := p.Bare(), p.Results[0]
	bare.Buffers = slices.Clone(p.Buffers)
	b := &bare.Buffers[r.Buffer]
	if b.Kind != Arena || !r.Dense() || b.Bytes != r.Shape.Size()*r.DType.Size() {
		return bare, -1
	}
	b.Kind = Setting
	first, end := p.ArenaBytes, 0
	inArena := func(b *Buffer) bool { return b.Kind == Arena && b.Last >= 0 }
	for i := range bare.Buffers {
		if b := &bare.Buffers[i]; inArena(b) {
			first, end = min(first, b.Offset), max(end, b.Offset+b.Bytes)
		}
	}
	for i := range bare.Buffers {
		if b := &bare.Buffers[i]; inArena(b) {
			b.Offset -= first
		}
	}
	bare.ArenaBytes, bare.ResultBytes = max(0, end-first), 0
	return bare, r.Buffer
}
