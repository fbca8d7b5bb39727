package autograd

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/elastic"
	"github.com/euryale-ml/euryale/internal/group"
	"github.com/euryale-ml/euryale/internal/residence"
)

// holding is which part of the solver's state, or of all, a rank of an elastic training has, from
// generation to generation. The zero value is for a process that has nothing.
type holding struct {
	held  fraction
	stale bool // it has applied a step, and has only its part of the parameters
}

// fraction is one of several parts of each bucket. The zero value is nothing.
type fraction struct{ Number, Of int }

// in returns which of n elements a part has.
func (s fraction) in(n int) span {
	if s.Of == 0 {
		return span{}
	}
	of := chunkOf(n, s.Number, s.Of)
	return span{min(of.from, n), min(of.to, n)}
}

// mirrors are the parts of all ranks.
type mirrors struct {
	own         *holding
	before, now []fraction
	begins      bool  // no rank had anything: before says that rank 0 had all
	lost        error // of the state: nobody has a part of it
}

// partsOf divides buckets among ranks, of which it knows on which machines they are.
func partsOf(nodes []int) []fraction {
	order, parts := make([]int, len(nodes)), make([]fraction, len(nodes))
	for r := range order {
		order[r] = r
	}
	slices.SortStableFunc(order, func(a, b int) int { return nodes[a] - nodes[b] })
	n := max(1, len(nodes)/2)
	for i, r := range order {
		parts[r] = fraction{i % n, n}
	}
	return parts
}

// source is elements, and a rank that has them.
type source struct {
	span
	root int
}

// sourcesOf returns who gives all ranks which of n elements of a bucket.
func sourcesOf(parts []fraction, n int) (all []source, err error) {
	for at := 0; at < n; {
		next := source{span: span{at, at}}
		for r, s := range parts {
			if in := s.in(n); in.from <= at && in.to > next.to {
				next.to, next.root = in.to, r
			}
		}
		if next.to == at {
			return nil, &lostPart{at: at, n: n}
		}
		all, at = append(all, next), next.to
	}
	return all, nil
}

// lostPart says that all ranks are lost that had an element of a bucket of n.
type lostPart struct {
	at, n int
	ranks []string // if this rank knows them
}

// Error implements error.
func (l *lostPart) Error() string {
	who := "the ranks that had it"
	if l.ranks != nil {
		who = "processes " + strings.Join(l.ranks, " and ")
	}
	return fmt.Sprintf("a shard is lost with %s: start the job again, from its newest checkpoint "+
		"(Elastic.Load)", who)
}

// name adds to the error of a generation which members of the one before had the lost part.
func (s *mirrors) name(err error, members []elastic.ID) error {
	var lost *lostPart
	if s == nil || !errors.As(err, &lost) {
		return err
	}
	for r, p := range s.now {
		if in := p.in(lost.n); in.from <= lost.at && lost.at < in.to {
			lost.ranks = append(lost.ranks, members[r].String())
		}
	}
	return wrapped("elastic training: %w", lost)
}

// gone returns the error of a state that is lost.
func (s *mirrors) gone() error {
	if s == nil {
		return nil
	}
	return s.lost
}

// moved reports whether ranks have other parts than before.
func (s *mirrors) moved() bool {
	return s != nil && s.lost == nil && (s.begins || !slices.Equal(s.before, s.now))
}

// writes reports whether a rank is the one that writes its part to a checkpoint, and stays until
// another one has it where all retire that have it.
func (s *mirrors) writes(rank int) bool {
	return s == nil || slices.Index(s.now, s.now[rank]) == rank
}

// leaves reports whether a rank may leave, given which want to: one of each part stays.
func (s *mirrors) leaves(rank int, wants func(rank int) bool) bool {
	if s == nil || s.now[rank].Of == 1 || !s.writes(rank) {
		return true
	}
	for r, p := range s.now {
		if p == s.now[rank] && !wants(r) {
			return true
		}
	}
	return false
}

// redivide returns the part that this rank has from now on of a vector that a solver keeps for a
// parameter, given the part that it had. It is collective.
func (d *reducer) redivide(p *param, mine backend.Buffer, t backend.DType) (backend.Buffer, error) {
	whole, at, rank := residence.Zeros(t, p.size), p.bucket.before(p), d.comm.Rank()
	n := p.bucket.count()
	of := func(s span) backend.Buffer { // of a bucket, as far as the parameter has them
		from := min(max(s.from-at, 0), p.size)
		return whole.Slice(from, max(from, min(s.to-at, p.size)))
	}
	copy(of(d.mirrors.before[rank].in(n)).Bytes(), mine.Bytes())
	all, err := sourcesOf(d.mirrors.before, n)
	for _, s := range all {
		if x := of(s.span); err == nil && x.Len() > 0 {
			c := backend.Collective{Kind: backend.Broadcast, Root: s.root}
			err = group.RunOnHost(d.comm, c, x, x)
		}
	}
	return residence.Clone(of(d.mirrors.now[rank].in(n))), err
}

// share gives all ranks the values of a bucket's parameters.
func (d *reducer) share(b *bucket, parts []fraction, why backend.Purpose) error {
	for _, p := range b.params {
		if err := p.load(p.node.Value()); err != nil {
			return err
		}
	}
	if b.staged() {
		if err := b.queue.Move(b.data, b.host); err != nil {
			return err
		}
	}
	err := d.broadcastParts(b, parts, why)
	if err == nil && b.staged() {
		err = cmp.Or(b.queue.Move(b.host, b.data), drain(b.queue))
	}
	if err != nil {
		return err
	}
	return b.unpack()
}

// shareOn is share of what is on a device, where a queue computes.
func (d *reducer) shareOn(q backend.Queue, b *bucket, parts []fraction,
	own, whole func(param int) backend.Buffer) error {
	done, err := q.Record()
	if err == nil {
		err = b.queue.Wait(done)
	}
	for _, p := range b.params {
		at := b.before(p)
		if s := d.shardOf(p, d.comm.Rank()); err == nil && s.from < s.to {
			err = b.queue.Move(b.data.Slice(at+s.from, at+s.to), own(p.index))
		}
	}
	if err == nil {
		err = d.broadcastParts(b, parts, backend.ForSync)
	}
	for _, p := range b.params {
		if at := b.before(p); err == nil {
			err = b.queue.Move(whole(p.index), b.data.Slice(at, at+p.size))
		}
	}
	return cmp.Or(err, drain(b.queue))
}

// broadcastParts gives all ranks what each has of a bucket.
func (d *reducer) broadcastParts(b *bucket, parts []fraction, why backend.Purpose) error {
	w, err := d.startParts(b, parts, b.data, backend.Buffer{}, b.origin(why), false)
	if err == nil {
		err = w.Join(context.Background()) // communicators end their waits by themselves
	}
	return err
}

// startParts starts to fill a bucket on all ranks with its parts, each from the first rank that has
// it: from own, or if that is empty from its place.
func (d *reducer) startParts(b *bucket, parts []fraction, whole, own backend.Buffer,
	of *backend.Origin, beside bool) (all backend.Works, err error) {
	list, err := sourcesOf(parts, b.count())
	for _, s := range list {
		c := backend.Collective{Kind: backend.Broadcast, Root: s.root, Origin: of, Beside: beside}
		dst := whole.Slice(s.from, s.to)
		src := dst
		if own.Len() > 0 && s.root == d.comm.Rank() {
			src = own.Slice(0, s.to-s.from)
		}
		w, err := d.comm.Start(b.queue, c, dst, src)
		if err != nil {
			_ = all.Join(context.Background()) // the memory is theirs until then
			return nil, fmt.Errorf("%v of %v: %w", c, b, err)
		}
		all = append(all, w)
	}
	return all, err
}
