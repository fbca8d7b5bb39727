package autograd

import (
	"encoding/binary"
	"fmt"
	"math"
	"math/bits"
	"slices"
	"strings"

	"gorgonia.org/gorgonia"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/residence"
	"github.com/euryale-ml/euryale/kernels"
)

// WithTree makes training give the same bits on any number of ranks. A step is n micro-batches,
// whoever runs them: each rank runs the same number ([TreeShare]) of consecutive ones, rank 0 the
// first, by [DataParallel.Accumulate]. All n gradients are added in the tree of [backend.Tree] and
// divided by n (with [WithSum] they are not), so let the loss of a micro-batch be the mean over its
// samples:
//
//	share, err := autograd.TreeShare(8, comm.Size())
//	dp, err := autograd.New(comm, params, autograd.WithTree(8))
//	err = dp.Accumulate(share, func(i int) error { ... }) // micro-batch comm.Rank()*share + i
//	grads, err := dp.Sync()
//	loss, err := autograd.TreeMean(comm, losses) // of this rank's micro-batches
//
// [ClipNorm] of these gradients has the same bits, too. A micro-batch must give the same gradients
// on every rank: ranks are on processors or GPUs of one kind, and random numbers depend on the
// micro-batch.
//
// Cost: that of Accumulate, memory for log2(n/P)-1 further sums of each gradient on each of P
// ranks, and a pass over the gradients that divides them. Between ranks a sum in a tree costs what
// another one costs.
//
// New returns ErrArgument for numbers that TreeShare refuses, with [WithPartial] and with
// [WithCompression], and ErrUnsupported if the communicator does not add parameters of their type
// in a tree ([backend.Capabilities]).
func WithTree(n int) Option { return func(o *options) { o.tree, o.inTree = n, true } }

// TreeShare returns how many of n micro-batches each of so many ranks runs in a step with
// [WithTree].
//
// Errors: ErrArgument, naming the numbers that work, unless the ranks divide n, and the share is a
// power of two: only then a rank adds up whole branches of the tree. A single rank may run any n.
func TreeShare(n, ranks int) (share int, err error) {
	switch {
	case n < 1 || ranks < 1:
		return 0, fmt.Errorf("%w: %d micro-batches on %d ranks: there must be at least 1 of both",
			backend.ErrArgument, n, ranks)
	case n%ranks != 0:
		return 0, fmt.Errorf("%w: %d micro-batches do not divide among %d ranks: %s",
			backend.ErrArgument, n, ranks, whatDivides(n, ranks))
	case ranks > 1 && bits.OnesCount(uint(n/ranks)) > 1:
		return 0, fmt.Errorf("%w: %d micro-batches are %d for each of %d ranks, which is no "+
			"power of two: %s", backend.ErrArgument, n, n/ranks, ranks, whatDivides(n, ranks))
	}
	return n / ranks, nil
}

// whatDivides says which numbers of ranks work with n micro-batches, and which numbers of
// micro-batches with so many ranks.
func whatDivides(n, ranks int) string {
	var list []string
	for p := 1; p <= n; p++ {
		if n%p == 0 && (p == 1 || bits.OnesCount(uint(n/p)) == 1) {
			list = append(list, fmt.Sprint(p))
		}
	}
	works := list[0]
	if last := len(list) - 1; last > 0 {
		works = strings.Join(list[:last], ", ") + " or " + list[last]
	}
	return fmt.Sprintf("use %s ranks, or %d, %d or %d micro-batches", works, ranks, 2*ranks,
		4*ranks)
}

// TreeMean returns the mean of numbers of micro-batches, such as their losses, of which each rank
// has as many: those of rank 0 come first. It is collective. Numbers are added in float64 in the
// tree of [WithTree], so that the mean has the same bits on any number of ranks.
//
// Cost: one all-gather of 8 bytes for each number. Errors come from the communicator;
// ErrArgument without numbers.
func TreeMean(comm backend.Communicator, numbers []float64) (mean float64, err error) {
	if err := backend.Given("autograd.TreeMean", "comm", comm); err != nil {
		return 0, err
	}
	if len(numbers) == 0 {
		err = fmt.Errorf("%w: no numbers", backend.ErrArgument)
	}
	var note []byte
	for _, x := range numbers {
		note = binary.LittleEndian.AppendUint64(note, math.Float64bits(x))
	}
	var notes [][]byte
	if err == nil {
		err = residence.Bound(comm.Device(), func() (err error) {
			notes, err = gather(backend.Label(comm, backend.ForMean), note)
			return err
		})
	}
	if err != nil {
		return 0, fmt.Errorf("autograd: rank %d of %s: tree mean: %w", comm.Rank(),
			comm.Name(), err)
	}
	var all []float64
	for _, note := range notes {
		for ; len(note) > 0; note = note[8:] {
			all = append(all, math.Float64frombits(binary.LittleEndian.Uint64(note)))
		}
	}
	return meanInTree(all), nil
}

// meanInTree returns the mean of numbers, added in the tree. It overwrites them.
func meanInTree(all []float64) float64 {
	n := len(all)
	for ; len(all) > 1; all = all[:(len(all)+1)/2] {
		for i := 0; i < len(all); i += 2 {
			all[i/2] = all[i]
			if i+1 < len(all) {
				all[i/2] += all[i+1]
			}
		}
	}
	return all[0] / float64(n)
}

// tree is what a DataParallel adds gradients of micro-batches in; nil without WithTree.
type tree struct {
	all, share int // micro-batches of a step, of all ranks and of this one
	run        int // of this rank's micro-batches, which one is under way
	begun      int // how many of them
}

// adds reports whether a rank has several micro-batches.
func (t *tree) adds() bool { return t != nil && t.share > 1 }

// complete returns an error unless all micro-batches of a step have run.
func (t *tree) complete() error {
	if t.adds() && t.begun < t.share {
		return fmt.Errorf("%w: %d of the %d micro-batches that a step has on this rank have run "+
			"(WithTree): run all by Accumulate", backend.ErrArgument, t.begun, t.share)
	}
	return nil
}

// newTree returns the tree that options ask for, nil for none.
func newTree(comm backend.Communicator, o options, params []*param) (*tree, error) {
	if !o.inTree {
		return nil, nil
	}
	share, err := TreeShare(o.tree, comm.Size())
	switch {
	case err != nil:
		return nil, fmt.Errorf("WithTree: %w", err)
	case o.partial || o.compress != nil:
		return nil, fmt.Errorf("WithTree: %w: with WithPartial ranks have no common sum, and "+
			"with WithCompression it depends on what each rank has rounded: leave them out",
			backend.ErrArgument)
	}
	can := comm.Capabilities().Tree
	for _, p := range params {
		if comm.Size() > 1 && !slices.Contains(can, p.dtype) {
			return nil,
				fmt.Errorf("WithTree: %w",
					backend.RefuseTree(comm, backend.Collective{Kind: backend.AllReduce,
						Association: backend.Tree}, p.dtype))
		}
	}
	return &tree{all: o.tree, share: share}, nil
}

// top is the level of the largest sum that a rank keeps: that of level k has 2^k micro-batches.
func (t *tree) top() int { return bits.Len(uint(t.share-1)) - 1 }

// branches returns the levels of the sums that the gradients of the present micro-batch are added
// to, one after the other, as a set of bits, and the level that the result has.
func (t *tree) branches() (levels uint, to int) {
	if t.run == t.share-1 {
		return uint(t.run), t.top()
	}
	to = bits.TrailingZeros(^uint(t.run))
	return 1<<to - 1, to
}

// sums are what a parameter keeps of the micro-batches so far.
type sums struct {
	levels []backend.Buffer // the largest is in the slot
	none   backend.Buffer   // zeros, the gradient in a micro-batch that has none
}

// prepare allocates the sums of p.
func (s *sums) prepare(t *tree, p *param) {
	if len(s.levels) > 0 {
		return
	}
	for range t.top() {
		s.levels = append(s.levels, zeros(p.slot))
	}
	s.levels, s.none = append(s.levels, p.slot), zeros(p.slot)
}

// add adds the gradient of the present micro-batch, nil for none, to the sums that it completes.
func (p *param) add(t *tree, g gorgonia.Value) error {
	p.sums.prepare(t, p)
	src := p.sums.none
	if g != nil {
		var err error
		if src, err = p.contiguous(g, backend.Buffer{}); err != nil {
			return fmt.Errorf("%w: gradient of %v %w", backend.ErrArgument, p, err)
		}
		p.held = true
	}
	k, kept := kernels.Host{}, p.sums.levels
	levels, to := t.branches()
	for level := range to + 1 {
		if levels>>level&1 == 0 {
			continue
		}
		sum := kept[level]
		if levels>>level == 1 { // the last one
			return k.Reduce(backend.Sum, kept[to], sum, src)
		}
		if err := k.Reduce(backend.Sum, sum, sum, src); err != nil {
			return err
		}
		src = sum
	}
	return k.Copy(kept[to], src)
}

// divide makes sums of gradients means.
func (d *DataParallel) divide() error {
	if d.scale == 1 {
		return nil
	}
	for _, b := range d.buckets {
		if err := (kernels.Host{}).Scale(b.host, b.host, d.scale); err != nil {
			return fmt.Errorf("%v: %w", b, err)
		}
	}
	return nil
}
