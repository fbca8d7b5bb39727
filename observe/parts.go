package observe

import (
	"hash/fnv"
	"time"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/observe/internal/straggler"
)

// stepPart is a part of the steps that a device replays: a layer, or the exchange of a bucket.
type stepPart struct {
	name   string // of a layer
	bucket int    // from 1, 0 for a layer
	spent  time.Duration
	usual  straggler.Level
}

// partOf returns the part of a name, or of a bucket. mu is held.
func (r *Recorder) partOf(name string, bucket int) *stepPart {
	for _, p := range r.parts {
		if p.name == name && p.bucket == bucket {
			return p
		}
	}
	p := &stepPart{name: name, bucket: bucket}
	r.parts = append(r.parts, p)
	return p
}

// layerName returns the name of a layer of which another rank has told the number.
func (r *Recorder) layerName(number float64) string {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, p := range r.parts {
		if p.bucket == 0 && numberOf(p.name) == number {
			return p.name
		}
	}
	return "a layer that only it has"
}

// numberOf returns a number for a name, the same on all ranks, which a float64 has exactly.
func numberOf(name string) float64 {
	h := fnv.New64a()
	h.Write([]byte(name))
	return float64(h.Sum64()>>12 | 1)
}

// layerMark is where a queue goes on with a layer in a graph.
type layerMark struct {
	part *stepPart // nil for none
	at   backend.TimedEvent
}

// Layer is told where layers begin in graphs: see [backend.WithHooks]. It does nothing before
// TimeParts.
func (r *Recorder) Layer(of backend.Communicator, q backend.Queue, name string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	p, at := r.stamp(of, q)
	if at == nil {
		return
	}
	m := layerMark{at: at}
	if p.layerOf, p.layerOn = p.named(of), r.number(q); name != "" {
		m.part = r.partOf(name, 0)
	}
	p.layers = append(p.layers, m)
}

// readLayers records the layers of a replay that began at from, in which its queue waited for calls
// at some times since then. mu is held.
func (r *Recorder) readLayers(p *replays, from time.Duration, waits [][2]time.Duration) {
	before := time.Duration(0)
	for i, m := range p.layers {
		at, _, err := m.at.Elapsed(p.begin)
		if err != nil {
			return
		}
		if i > 0 && p.layers[i-1].part != nil {
			r.layerRan(p, p.layers[i-1].part, before, at, from, waits)
		}
		before = at
	}
}

// layerRan counts a layer that ran from one time since the begin of a replay to another.
func (r *Recorder) layerRan(p *replays, layer *stepPart, since, until, from time.Duration,
	waits [][2]time.Duration) {
	busy := until - since
	for _, w := range waits {
		busy -= max(min(w[1], until)-max(w[0], since), 0)
	}
	if layer.spent += busy; !r.layers {
		return
	}
	this := r.fresh()
	this.comm, this.queue, this.header.Seq = p.layerOf, p.layerOn, p.count
	this.part = &timedPart{name: layer.name, layer: true, busy: busy}
	this.from, this.to, this.end = from+since, max(from+until, 1), 1
	r.advance()
}
