package group

import (
	"cmp"
	"context"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/rendezvous"
)

// Gatherer gives every rank the note of every rank, by rank. It is collective: ranks agree on
// something by telling each other what they know, and then all decide the same. Notes may
// have different lengths.
type Gatherer func(note []byte) ([][]byte, error)

// OverStore returns the Gatherer of some ranks of a world, of all without members. key is used by
// nobody else. A round takes one round trip to the rank that serves the store.
func OverStore(ctx context.Context, w *rendezvous.World, key string, members ...int) Gatherer {
	round := 0
	return func(note []byte) ([][]byte, error) {
		round++
		return w.AllGather(ctx, fmt.Sprintf("%s/%d", key, round), note, members...)
	}
}

// Presence is a communicator whose ranks see who still takes part.
type Presence interface {
	// Gone returns why rank r has no part any more in what the ranks of the group begin: the group
	// has ended, or that rank has closed it. It is nil if nothing of that is known.
	Gone(r int) error
}

// Among returns the Gatherer of the ranks of comm over the store of their world, and their numbers
// in it, nil for all. A rank that closes comm lets nobody wait, if comm is a [Presence]. key is
// used by nobody else.
func Among(
	ctx context.Context, w *rendezvous.World, key string, comm backend.Communicator,
) (Gatherer, backend.Members, error) {
	members := comm.Capabilities().Members
	if members == nil && comm.Size() < w.Size {
		return nil, nil, fmt.Errorf("%w: a group of %d of %d ranks, whose Capabilities have no "+
			"Members",
			backend.ErrUnsupported, comm.Size(), w.Size)
	}
	var gone func(r int) error
	if seen, ok := backend.As[Presence](comm); ok {
		gone = seen.Gone
	}
	round := 0
	return func(note []byte) ([][]byte, error) {
		round++
		ctx, over := attended(ctx, gone, comm.Rank(), comm.Size())
		defer over()
		return w.AllGather(ctx, fmt.Sprintf("%s/%d", key, round), note, members...)
	}, members, nil
}

// goneLook is between two looks for ranks that leave.
const goneLook = 10 * time.Millisecond

// attended returns ctx ending when another of some ranks than this one is gone, with why. gone says
// that of a rank; it is nil where nobody can tell. That a rank has closed counts after ReportGrace:
// it may have closed because of an end that is on its way here.
func attended(
	ctx context.Context, gone func(r int) error, rank, ranks int,
) (context.Context, func()) {
	if gone == nil {
		return ctx, func() {}
	}
	ctx, cancel := context.WithCancelCause(ctx)
	go func() {
		tick := time.NewTicker(goneLook)
		defer tick.Stop()
		for closed := (time.Time{}); ctx.Err() == nil; {
			err := absent(gone, rank, ranks)
			switch {
			case err == nil:
			case !errors.Is(err, backend.ErrClosed):
				cancel(err)
			case closed.IsZero():
				closed = time.Now()
			case time.Since(closed) > ReportGrace:
				cancel(err)
			}
			select {
			case <-ctx.Done():
			case <-tick.C:
			}
		}
	}()
	return ctx, func() { cancel(nil) }
}

// absent returns why another rank is gone: rather than that one has closed, what the group has
// ended with.
func absent(gone func(r int) error, rank, ranks int) (why error) {
	for r := range ranks {
		if r == rank {
			continue
		}
		if err := gone(r); err != nil && (why == nil || errors.Is(why, backend.ErrClosed)) {
			why = err
		}
	}
	return why
}

// Framed returns the Gatherer over an exchange of notes that have one length on all ranks, of
// at most most bytes: NoteBytes or more.
func Framed(most int, exchange Gatherer) Gatherer {
	const head = 4 // bytes of the length
	return func(note []byte) ([][]byte, error) {
		first := append(binary.LittleEndian.AppendUint32(nil, uint32(len(note))),
			note[:min(len(note), NoteBytes-head)]...)
		all, err := exchange(padded(first, NoteBytes))
		if err != nil {
			return nil, err
		}
		notes, lengths, longest := make([][]byte, len(all)), make([]int, len(all)), 0
		for r, frame := range all {
			lengths[r] = int(binary.LittleEndian.Uint32(frame))
			notes[r] = slices.Clone(frame[head:])
			longest = max(longest, lengths[r])
		}
		for at, end := NoteBytes-head, 0; at < longest; at = end {
			end = at + min(most, longest-at) // at + most may overflow
			all, err := exchange(padded(note[min(at, len(note)):min(end, len(note))], end-at))
			if err != nil {
				return nil, err
			}
			for r, frame := range all {
				notes[r] = append(notes[r], frame...)
			}
		}
		for r, n := range lengths {
			notes[r] = notes[r][:n]
		}
		return notes, nil
	}
}

// padded returns n bytes that begin with b.
func padded(b []byte, n int) []byte {
	p := make([]byte, n)
	copy(p, b)
	return p
}

// Exchange gives every rank the value of every rank.
func Exchange[T any](g Gatherer, m backend.Members, mine T) ([]T, error) {
	note, err := json.Marshal(mine)
	if err != nil {
		return nil, err
	}
	notes, err := g(note)
	if err != nil {
		return nil, err
	}
	all := make([]T, len(notes))
	for r, note := range notes {
		if err := json.Unmarshal(note, &all[r]); err != nil {
			return nil, fmt.Errorf("%s sent what cannot be read: %w", m.Rank(r), err)
		}
	}
	return all, nil
}

// Agree is Exchange and a vote in one round: problem is why this rank cannot go on, see
// [Gatherer.Vote].
func Agree[T any](g Gatherer, m backend.Members, mine T, problem error) ([]T, error) {
	type told struct {
		Problem []byte
		Value   T
	}
	notes, err := Exchange(g, m, told{problemNote(problem), mine})
	if err != nil {
		return nil, errors.Join(problem, err)
	}
	problems, all := make([][]byte, len(notes)), make([]T, len(notes))
	for r, note := range notes {
		problems[r], all[r] = note.Problem, note.Value
	}
	return all, verdict(m, problem, problems)
}

// Refusal is why ranks do not go on together: the problem of the first rank that has one. It
// says the same on every rank.
type Refusal struct {
	Rank       int
	name, text string
	kind       error // the sentinel that it wraps, nil if none
	own        error // the problem itself, on Rank
}

// Error names the rank and its problem.
func (r *Refusal) Error() string {
	if r.kind == nil {
		return fmt.Sprintf("%s failed: %s", r.name, r.text)
	}
	return fmt.Sprintf("%v: %s failed: %s", r.kind, r.name,
		strings.TrimPrefix(r.text, r.kind.Error()+": "))
}

// Unwrap returns the sentinel on every rank, and the problem itself where it is known.
func (r *Refusal) Unwrap() []error {
	return slices.DeleteFunc([]error{r.kind, r.own}, func(err error) bool { return err == nil })
}

// kinds are the sentinels that a Refusal passes on: they are numbered as in this array. Later
// ones may wrap earlier ones.
func kinds() []error {
	return []error{nil, backend.ErrArgument, backend.ErrUnsupported, ErrNoMemory, errUnseen}
}

// Vote tells every rank whether all can go on: mine is this rank's problem. The error is a
// [*Refusal], the same on every rank, unless the notes do not get through. The members
// name the ranks.
func (g Gatherer) Vote(m backend.Members, mine error) error {
	notes, err := g(problemNote(mine))
	if err != nil {
		return errors.Join(mine, err)
	}
	return verdict(m, mine, notes)
}

// verdict returns the outcome of a vote: the problem of the first rank that has one. What another
// way may mend counts for less.
func verdict(m backend.Members, mine error, notes [][]byte) error {
	var refusal *Refusal
	for r, note := range notes {
		if len(note) == 0 {
			continue
		}
		found := &Refusal{Rank: r, name: m.Rank(r), text: string(note[1:])}
		if k := int(note[0]); k < len(kinds()) {
			found.kind = kinds()[k]
		}
		if refusal == nil || mendable(refusal.kind) && !mendable(found.kind) {
			refusal = found
		}
	}
	if refusal == nil {
		return nil
	}
	if mine != nil && string(problemNote(mine)[1:]) == refusal.text {
		refusal.own = mine
	}
	return refusal
}

func mendable(problem error) bool { return errors.Is(problem, ErrNoMemory) }

// problemNote encodes a problem as its kind and its text, nil as nothing.
func problemNote(problem error) []byte {
	if problem == nil {
		return nil
	}
	kind := 0
	for k, sentinel := range kinds() {
		if sentinel != nil && errors.Is(problem, sentinel) {
			kind = k
		}
	}
	return append([]byte{byte(kind)}, problem.Error()...)
}

// Part is what a split makes of the ranks that pass one color.
type Part struct {
	Name    string
	Number  int   // of the color among those in use; -1 where the color is negative
	Ranks   []int // of the group that is split, by rank of the part; nil there
	Rank    int   // of this rank in the part; -1 there
	Members backend.Members
}

// Together reports whether all ranks of the part are on one machine: nodes has one for each of the
// job's ranks.
func (p Part) Together(nodes []int) bool {
	elsewhere := func(r int) bool { return nodes[r] != nodes[p.Members[0]] }
	return !slices.ContainsFunc(p.Members, elsewhere)
}

// Whole is all ranks of a world.
func Whole(w *rendezvous.World) Part {
	part := Part{Name: w.Name, Rank: w.Rank}
	for r := range w.Size {
		part.Ranks, part.Members = append(part.Ranks, r), append(part.Members, r)
	}
	return part
}

// Pass is what a rank passes to a split.
type Pass = struct{ Color, Key int }

// Splitter is a communicator that can be split in several ways at once, in as many round trips as
// in one: into the parts of each, by what its ranks pass. The ranks know that of all ranks, and
// pass the same. Their gatherer is not the communicator itself, which may have calls under way.
// Parts are nil for a rank that passes a negative color. It fails on all ranks or on none: problem
// is why this rank cannot go on.
type Splitter interface {
	// SplitAll splits. Without ways it gives up what [Connector.ConnectSplit] has made.
	SplitAll(g Gatherer, ways [][]Pass, problem error) ([]backend.Communicator, error)
}

// Connector is a backend that connects the ranks of a world and of its parts at once, in as many
// round trips as the ranks alone.
type Connector interface {
	// ConnectSplit is Connect. The parts are for a SplitAll in the same ways.
	ConnectSplit(
		ctx context.Context, w *rendezvous.World, ways [][]Pass,
	) (backend.Communicator, error)
}

// Split finds the part of this rank: the ranks that pass the same color, ordered by key and
// then by rank. A rank that passes a negative color is in none, but takes part.
func (m *Member) Split(g Gatherer, color, key int) (Part, error) {
	all, err := Exchange(g, m.Members, Pass{color, key})
	if err != nil {
		return Part{}, err
	}
	return m.PartOf(all), nil
}

// PartOf is Split where every rank knows what all ranks pass.
func (m *Member) PartOf(all []Pass) Part {
	whole := Part{Name: m.Name, Rank: m.Rank, Members: m.Members}
	return whole.Split(fmt.Sprint(m.splits.Add(1)), all)
}

// Split returns the part of this rank, by what all ranks pass. The name tells ways apart.
func (p Part) Split(name string, all []Pass) Part {
	color := all[p.Rank].Color
	part := Part{Name: fmt.Sprintf("%s/%s.%d", p.Name, name, color), Number: -1, Rank: -1}
	if color < 0 {
		return part
	}
	var colors []int
	for r, pass := range all {
		if pass.Color >= 0 {
			colors = append(colors, pass.Color)
		}
		if pass.Color == color {
			part.Ranks = append(part.Ranks, r)
		}
	}
	slices.Sort(colors)
	part.Number, _ = slices.BinarySearch(slices.Compact(colors), color)
	slices.SortStableFunc(part.Ranks, func(a, b int) int {
		return cmp.Compare(all[a].Key, all[b].Key)
	})
	part.Rank = slices.Index(part.Ranks, p.Rank)
	for _, r := range part.Ranks {
		part.Members = append(part.Members, p.Members[r])
	}
	return part
}

// AgreeOnAlloc gives every rank the state of every rank, and an error on every rank, after
// which the group is as good as before, if not all pass the same number of bytes.
func (m *Member) AgreeOnAlloc(g Gatherer, nbytes int, state []byte) (states [][]byte, err error) {
	states, err = g(append(binary.LittleEndian.AppendUint64(nil, uint64(nbytes)), state...))
	if err != nil {
		return nil, err
	}
	for p, note := range states {
		if theirs := int(binary.LittleEndian.Uint64(note)); theirs != nbytes && err == nil {
			err = fmt.Errorf("%w: %v: alloc of %d bytes here, of %d on %s: every rank must pass "+
				"the same", backend.ErrArgument, m, nbytes, theirs, m.Members.Rank(p))
		}
		states[p] = note[8:]
	}
	return states, err
}
