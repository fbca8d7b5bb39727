package plan

import (
	"cmp"
	"slices"
)

// Alignment of buffers in the arena: cudaMalloc's, so that vector loads work on devices.
const Alignment = 256

// lives sets the steps during which each buffer is in use.
func lives(p *Plan) {
	for i := range p.Buffers {
		p.Buffers[i].First, p.Buffers[i].Last = len(p.Steps), -1
	}
	use := func(r Ref, step int) {
		for i := r.Buffer; i >= 0; i = p.Buffers[i].Within - 1 {
			b := &p.Buffers[i]
			b.First, b.Last = min(b.First, step), max(b.Last, step)
		}
	}
	for i, s := range p.Steps {
		first, last := i, i
		for p.Steps[first].Epilogue {
			first-- // it writes while the product still reads
		}
		for last+1 < len(p.Steps) && p.Steps[last+1].Epilogue {
			last++
		}
		end := i
		if s.Until > 0 {
			end = s.Until + 1 // which waits before it writes
		}
		for _, d := range s.Dsts {
			use(d, first)
			use(d, end)
		}
		for _, a := range s.Args {
			use(a, i)
			use(a, max(last, end))
		}
	}
	for _, r := range p.Results {
		use(r, len(p.Steps))
	}
}

// usage returns how many bytes of the arena are in use during each step.
func (p *Plan) usage() []int {
	bytes := make([]int, len(p.Steps)+2)
	for _, b := range p.Buffers {
		if b.Kind == Arena && b.Last >= 0 {
			bytes[b.First] += b.Bytes
			bytes[b.Last+1] -= b.Bytes
		}
	}
	for i := range p.Steps {
		bytes[i+1] += bytes[i]
	}
	return bytes[:len(p.Steps)]
}

// Peak returns the step during which most of the arena is in use.
func (p *Plan) Peak() int {
	peak, usage := 0, p.usage()
	for i, n := range usage {
		if n > usage[peak] {
			peak = i
		}
	}
	return peak
}

// Largest returns the n largest buffers of those that are in use at the Peak, the largest first.
func (p *Plan) Largest(n int) []Buffer {
	peak := p.Peak()
	used := slices.DeleteFunc(slices.Clone(p.Buffers), func(b Buffer) bool {
		return b.Within > 0 || b.Kind == Arena && (peak < b.First || b.Last < peak)
	})
	slices.SortStableFunc(used, func(a, b Buffer) int { return cmp.Compare(b.Bytes, a.Bytes) })
	seen := map[memory]bool{}
	used = slices.DeleteFunc(used, func(b Buffer) bool { // which is where a larger one is
		known := b.Kind != Arena && seen[b.memory()]
		seen[b.memory()] = true
		return known
	})
	return used[:min(n, len(used))]
}

// keepAll makes all buffers of the arena live from the first step to the last, so that none takes
// the place of another.
func keepAll(p *Plan) {
	for i := range p.Buffers {
		if b := &p.Buffers[i]; b.Last >= 0 {
			b.First, b.Last = 0, max(b.Last, len(p.Steps)-1)
		}
	}
}

// shareInPlace lets loops write over operands that nobody needs later.
func shareInPlace(p *Plan) {
	lives(p)
	to := make([]int, len(p.Buffers)) // which buffer has taken the place of another
	for i := range to {
		to[i] = i
	}
	for i, s := range p.Steps {
		for j := range s.Args {
			s.Args[j].Buffer = to[s.Args[j].Buffer]
		}
		over := s.Args
		if _, loop := s.Op.(Loop); !loop {
			over = nil
		}
		for j, dst := range s.Dsts {
			s.Dsts[j].Buffer = to[dst.Buffer] // of a put, which writes over an operand
			for _, a := range over {
				if inPlace(p, s, j, a, i) &&
					!(s.Epilogue && slices.ContainsFunc(p.Steps[i-1].Args, func(read Ref) bool {
						return read.Buffer == a.Buffer
					})) {
					to[dst.Buffer], s.Dsts[j].Buffer = a.Buffer, a.Buffer
					p.Buffers[a.Buffer].Last = p.Buffers[dst.Buffer].Last
					break
				}
			}
		}
	}
	for i := range p.Results {
		p.Results[i].Buffer = to[p.Results[i].Buffer]
	}
}

// inPlace reports whether a loop may write result j over the operand a, which nobody reads later:
// [fuse.Program.InPlace] says so of all operands of that memory, each of which begins it.
func inPlace(p *Plan, s Step, j int, a Ref, step int) bool {
	loop, dst, b := s.Op.(Loop), s.Dsts[j], &p.Buffers[a.Buffer]
	if b.Kind != Arena || p.Buffers[dst.Buffer].Kind != Arena || b.Last != step ||
		b.Bytes != p.Buffers[dst.Buffer].Bytes || b.DType != dst.DType {
		return false
	}
	for _, other := range s.Dsts {
		if other.Buffer == a.Buffer {
			return false
		}
	}
	for k, other := range s.Args {
		if other.Buffer == a.Buffer && (other.Offset != 0 || !loop.Program.InPlace(j, k)) {
			return false
		}
	}
	return true
}

// fillGradients puts values into the memory of gradients that ranks exchange, until these are
// computed: copies of weights in 16 bits, say, which the backward pass has read before it comes to
// the layers of these gradients. Between two runs nobody reads these. It takes what is in use at
// the Peak.
func (p *Plan) fillGradients() {
	if p.Accumulation.Keeps() {
		return
	}
	free, first := p.gradientBuffers()
	if len(free) == 0 {
		return
	}
	var values []int
	divided := map[int]bool{} // it has parts, which are where it is
	for _, b := range p.Buffers {
		divided[b.Within-1] = true
	}
	peak := p.Peak()
	for i, b := range p.Buffers {
		if b.Kind == Arena && b.First <= peak && peak <= b.Last && b.Last < len(p.Steps) &&
			!divided[i] {
			values = append(values, i)
		}
	}
	slices.SortStableFunc(values, func(x, y int) int {
		a, b := &p.Buffers[x], &p.Buffers[y]
		return cmp.Or(cmp.Compare(b.Bytes, a.Bytes), cmp.Compare(b.Last, a.Last))
	})
	for _, i := range values {
		b := &p.Buffers[i]
		at := slices.IndexFunc(free, func(gradient int) bool {
			of := &p.Buffers[gradient]
			return b.Last < first[of.memory()] && b.Bytes+Alignment <= of.Bytes
		})
		if at >= 0 {
			of := &p.Buffers[free[at]]
			b.Kind, b.Index, b.Vector = of.Kind, of.Index, of.Vector
			free = slices.Delete(free, at, at+1)
		}
	}
}

// gradientBuffers returns the buffers of gradients in buckets, by the first steps that use them.
func (p *Plan) gradientBuffers() (all []int, first map[memory]int) {
	first = map[memory]int{}
	for i := range p.Buffers {
		b := &p.Buffers[i]
		if b.Kind != Gradient || b.Within > 0 || b.Last < 0 {
			continue
		}
		at, known := first[b.memory()]
		if !known || b.First < at {
			first[b.memory()] = b.First
		}
		if !known && p.Updates[b.Index].Bucket > 0 {
			all = append(all, i)
		}
	}
	slices.SortStableFunc(all, func(x, y int) int {
		return cmp.Compare(first[p.Buffers[x].memory()], first[p.Buffers[y].memory()])
	})
	return all, first
}

// assignOffsets gives every Arena buffer its place. Those of results come first, one behind the
// other, so that one copy fetches them all. Behind them each has the lowest place that is free
// during its life, large ones first. If that leaves gaps, those come first that are large for long,
// such as residuals, unless the arena is larger then.
func assignOffsets(p *Plan) {
	var order []int
	for i, b := range p.Buffers {
		if b.Kind == Arena && b.Last >= 0 && b.Bytes > 0 {
			order = append(order, i)
		}
	}
	p.place(order, func(b Buffer) int { return b.Bytes })
	if usage := p.usage(); len(usage) > 0 && p.ArenaBytes > slices.Max(usage)/gaps*(gaps+1) {
		largest := *p
		largest.Buffers = slices.Clone(p.Buffers)
		p.place(order, func(b Buffer) int { return b.Bytes * (b.Last - b.First + 1) })
		if p.ArenaBytes >= largest.ArenaBytes {
			*p = largest
		}
	}
	p.placeParts()
}

// gaps is how many times larger the values of the Peak are than the gaps that may be left.
const gaps = 64

// place gives buffers places, by size, and late ones, which live beside results, before others.
func (p *Plan) place(order []int, size func(b Buffer) int) {
	wanted := func(i int) bool { return p.Buffers[i].Last == len(p.Steps) }
	slices.SortStableFunc(order, func(a, b int) int {
		if wanted(a) != wanted(b) {
			return cmp.Compare(p.Buffers[b].Last, p.Buffers[a].Last)
		}
		return cmp.Or(cmp.Compare(size(p.Buffers[b]), size(p.Buffers[a])),
			cmp.Compare(p.Buffers[b].First, p.Buffers[a].First))
	})
	p.ArenaBytes, p.ResultBytes = 0, 0
	var placed []span // by place
	for _, i := range order {
		b := &p.Buffers[i]
		b.Offset = 0
		for _, c := range placed {
			if !wanted(i) && (c.last < b.First || b.Last < c.first) {
				continue
			}
			if b.Offset+b.Bytes <= c.offset {
				break
			}
			b.Offset = max(b.Offset, (c.end+Alignment-1)/Alignment*Alignment)
		}
		p.ArenaBytes = max(p.ArenaBytes, b.Offset+b.Bytes)
		if wanted(i) {
			p.ResultBytes = max(p.ResultBytes, b.Offset+b.Bytes)
		}
		at, _ := slices.BinarySearchFunc(placed, b.Offset, func(c span, offset int) int {
			return cmp.Compare(c.offset, offset)
		})
		placed = slices.Insert(placed, at, span{b.Offset, b.Offset + b.Bytes, b.First, b.Last})
	}
}

// span is the place of a buffer in the arena, and when it is in use: all that is looked at for
// every pair.
type span struct{ offset, end, first, last int }
