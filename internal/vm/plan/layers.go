package plan

import (
	"slices"
	"strconv"
	"strings"

	"github.com/euryale-ml/euryale/internal/vm/ir"
	"github.com/euryale-ml/euryale/internal/vm/lower"
)

// mostLayers bounds how often the layer changes from step to step: beyond that, neighbours become
// one. A device that is observed notes the time at each change.
const mostLayers = 64

// Layers names the layer of each step: "h.3", and "h.3 backward" from the first gradient of a
// learnable on. Steps that read learnables of a layer, or compute their gradients, are of that
// layer, and others go on with the one before, or the first one. Steps for the learnables of all
// layers have the name of what they do: "update".
func (p *Plan) Layers() []string {
	owner := p.owners()
	names, now, pass := make([]string, len(p.Steps)), "", ""
	for i, s := range p.Steps {
		switch op := s.Op.(type) {
		case Joined:
			names[i] = op.What
			continue
		case Send, Receive:
			names[i] = names[max(i-1, 0)]
			continue
		}
		var of []string
		for k, r := range append(slices.Clone(s.Dsts), s.Args...) {
			if layer := owner[r.Buffer]; layer != "" {
				if of = append(of, layer); k < len(s.Dsts) {
					pass = " backward"
				}
			}
		}
		if len(of) > 0 && !slices.Contains(of, now) {
			now = of[0]
		}
		if names[i] = now; now != "" {
			names[i] += pass
		}
	}
	if first := slices.IndexFunc(names, func(s string) bool { return s != "" }); first > 0 {
		copy(names, slices.Repeat(names[first:first+1], first))
	}
	return coarser(names)
}

// owners returns the layer of each buffer that has a learnable, a cast of one, or the gradient for
// an update, "" for other buffers.
func (p *Plan) owners() []string {
	layers, owner := map[int]string{}, make([]string, len(p.Buffers))
	for _, v := range p.Program.Values {
		in, ok := v.Op.(ir.Input)
		if ok && (slices.Contains(p.Program.Frozen, v.Op) ||
			slices.ContainsFunc(p.Updates, func(u lower.Update) bool {
				return u.Input == in.Index
			})) {
			layers[in.Index] = layerOf(v.Name)
		}
	}
	for i, b := range p.Buffers {
		switch b.Kind {
		case Input:
			owner[i] = layers[b.Index]
		case Unsharded:
			owner[i] = layers[p.Updates[b.Index].Input]
		}
	}
	for _, s := range p.Steps {
		switch op := s.Op.(type) {
		case Send:
			for _, r := range s.Args {
				if b := p.Buffers[r.Buffer]; b.Kind == Gradient {
					owner[r.Buffer] = layers[p.Updates[b.Index].Input]
				}
			}
		case Joined:
			for k := range op.Programs {
				n, m := len(op.Programs), len(s.Dsts)
				args := s.Args[k*len(s.Args)/n : (k+1)*len(s.Args)/n]
				all := append(slices.Clone(args), s.Dsts[k*m/n:(k+1)*m/n]...)
				at := slices.IndexFunc(all, func(r Ref) bool { return owner[r.Buffer] != "" })
				for _, r := range all {
					if at >= 0 && p.Buffers[r.Buffer].Kind == Arena {
						owner[r.Buffer] = owner[all[at].Buffer]
					}
				}
			}
		}
	}
	return owner
}

// layerOf returns the layer of a learnable: its name up to the first number between dots, or
// without what is behind the last dot.
func layerOf(name string) string {
	parts := strings.Split(name, ".")
	for i, part := range parts[1:] {
		if _, err := strconv.Atoi(part); err == nil {
			return strings.Join(parts[:i+2], ".")
		}
	}
	return strings.Join(parts[:max(len(parts)-1, 1)], ".")
}

// coarser joins layers that come one after the other until they change often enough.
func coarser(names []string) []string {
	runs := slices.CompactFunc(slices.Clone(names), func(a, b string) bool { return a == b })
	each := (len(runs) + mostLayers - 1) / mostLayers
	if each <= 1 {
		return names
	}
	run, joined := 0, make([]string, len(names))
	for i, name := range names {
		if i > 0 && name != names[i-1] {
			run++
		}
		first := run / each * each
		joined[i] = runs[first]
		if last := min(first+each, len(runs)) - 1; last > first {
			joined[i] += " to " + runs[last]
		}
	}
	return joined
}
