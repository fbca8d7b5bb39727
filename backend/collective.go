package backend

import (
	"fmt"
	"math"
	"slices"
	"strings"
)

// Kind says what a collective does. Names are NCCL's.
type Kind uint8

// The collectives. P is the number of ranks; s, r count ranks.
const (
	AllReduce     Kind = iota + 1 // y = op over s of x[s], on every rank
	ReduceScatter                 // y = chunk r of op over s of x[s]
	AllGather                     // y = x[0], x[1], ... on every rank
	AllToAll                      // chunk s of y is chunk r of x[s]
	Broadcast                     // y = x[root] on every rank
	Reduce                        // y = op over s of x[s], on root
	Gather                        // y = x[0], x[1], ... on root
	Scatter                       // y = chunk r of x[root]
)

// ReduceOp says how AllReduce, ReduceScatter and Reduce combine the ranks.
//
// Ranks are combined in rank order, unless the call's [Association] is another one.
// 16-bit floats are accumulated in 32 bits and rounded once. Avg divides the sum by P once, at the
// end (integers truncate towards zero); integer sums and products wrap. Min and Max return NaN if
// any operand is NaN, and order -0 before +0.
//
// Backends that add floats in another order, or round more often, say so in their
// package comments: packages gpu, for NCCL, and hierarchy do.
type ReduceOp uint8

// The reductions. Sum is the zero value.
const (
	Sum ReduceOp = iota
	Avg
	Prod
	Min
	Max
)

// Association says in which order a Sum or Avg adds its operands. Sums of floats depend on it.
type Association uint8

// The associations. InRankOrder is the zero value.
const (
	// InRankOrder adds one rank after the other: ((x[0] + x[1]) + x[2]) + x[3].
	InRankOrder Association = iota
	// Tree adds neighbours, then neighbouring sums, and so on: (x[0] + x[1]) + (x[2] + x[3]). If a
	// level has an odd number, its last one joins the next level as it is. If each rank adds up 2^k
	// consecutive terms of a longer sum in this way, the ranks together get the bits that one rank
	// gets for the whole sum. Other numbers of terms make several branches of the whole tree, which
	// an AllReduce takes with Splits. Only communicators whose [Capabilities] say Tree can do it.
	Tree
)

// Algorithm forces a way to run a collective, for tests and debugging; Auto,
// the zero value, lets the communicator choose. Every algorithm gives bitwise
// identical results.
type Algorithm uint8

// The algorithms.
const (
	Auto    Algorithm = iota
	OneShot           // every rank reads every rank's data and combines it all
	TwoShot           // reduce-scatter, then all-gather
)

// Collective describes one call. It is a small value, the same on every rank.
//
// Its size of 80 bytes is a multiple of 16. A copy of 72 bytes ends with 16 that overlap those
// before. Each layer copies that copy, and the processor would wait until it is in the cache: 3 ns
// a layer.
type Collective struct {
	Kind Kind
	Op   ReduceOp

	// Association is the order of additions, for Sum and Avg.
	Association Association

	Algorithm Algorithm

	// Exact forbids wrappers to round the operands or to leave parts of them out.
	Exact bool

	// AllowHalf permits the operands of a Sum or Avg AllReduce of F32 to travel as F16 or BF16,
	// rounded as package half says; the zero value does not permit it. It is a permission, not a
	// requirement, and is not compared across ranks: see [Capabilities].Transport.
	AllowHalf DType

	// Beside says that the devices compute while the call runs, so the communicator should prefer
	// ways that leave them their multiprocessors. It is a hint, the same on every rank. dst of an
	// AllReduce or AllGather must lie at the same place of memory from Alloc on every rank, or
	// outside such memory on every rank. Headers do not contain it; replays of graphs in which
	// ranks have recorded different ways or places for it are a [MismatchError].
	Beside bool

	Root int

	// Splits are uneven chunk lengths in elements; nil means even chunks.
	// ReduceScatter, AllGather, Gather and Scatter take P lengths: Splits[r] is
	// the chunk of rank r. AllToAll takes P*P: Splits[s*P+r] is what rank s
	// sends to rank r.
	//
	// An AllReduce in a [Tree] takes P numbers of terms: rank r has added up Splits[r] consecutive
	// terms of a longer sum, which begins with those of rank 0. The source is the sums of the
	// rank's [Branches], one after the other. Each is as long as the destination, which may be the
	// first of them.
	Splits []int

	// Rows says that the pieces of an AllToAll lie side by side; nil: one after the other. Only
	// communicators whose [Capabilities] say Rows can do it.
	Rows *Rows

	// State names a persistent operand, for wrappers that keep state for each
	// operand (error feedback, say): a number up to 2^32-1; 0 means none.
	State int

	// Origin says where in the program the call comes from; nil says nothing. Whoever
	// starts the call must not change it afterwards.
	Origin *Origin

	// Original is for wrappers: the call that they were asked for.
	Original Original
}

// Rows is the layout of the operands of an AllToAll. Each operand consists of rows. A row holds one
// part of each piece, in rank order; all parts of a piece are equally long. A piece is its parts,
// one row after the other. So an axis of a tensor is cut, or joined, in place: the axes before it
// are the rows.
//
//	x [2, 3, P*4], cut along the last axis: 6 rows, of 4 elements of each piece
type Rows struct {
	Src, Dst []int // how many rows the source, and the destination, of each rank has
}

// row describes one Kind.
type row struct {
	name    string
	reduces bool // Op matters
	rooted  bool // Root matters
	adjoint Kind
	// splits is the number of split lengths it takes for P ranks, 0 if none.
	splits func(P int) int
	// src and dst return the lengths that rank r passes, in elements, given the count of the call:
	// the elements of one even chunk, or of the whole operand where there are no chunks. -1 means
	// that the rank's buffer is ignored.
	src, dst func(l layout, r, P, count int) int
	// busFactor converts bytes/time of the largest buffer to the traffic a link
	// sees (nccl-tests' busbw).
	busFactor func(P int) float64
}

// layout is what the lengths of a call depend on. It fits registers, unlike a Collective.
type layout struct {
	root   int
	splits []int
}

func (c *Collective) layout() layout { return layout{c.Root, c.Splits} }

func wholeCount(_ layout, _, _, count int) int { return count }

func chunk(l layout, r, _, count int) int {
	if l.splits == nil {
		return count
	}
	return l.splits[r]
}

func chunks(l layout, _, P, count int) int {
	if l.splits == nil {
		return P * count
	}
	return sum(l.splits)
}

func onRoot(f func(layout, int, int, int) int) func(layout, int, int, int) int {
	return func(l layout, r, P, count int) int {
		if r != l.root {
			return -1
		}
		return f(l, r, P, count)
	}
}

func sent(l layout, r, P, count int) int {
	if l.splits == nil {
		return P * count
	}
	return sum(l.splits[r*P : (r+1)*P])
}

func received(l layout, r, P, count int) int {
	if l.splits == nil {
		return P * count
	}
	n := 0
	for s := range P {
		n += l.splits[s*P+r]
	}
	return n
}

func none(int) int      { return 0 }
func perRank(P int) int { return P }
func perPair(P int) int { return P * P }

func one(int) float64         { return 1 }
func others(P int) float64    { return float64(P-1) / float64(P) }
func twiceOver(P int) float64 { return 2 * others(P) }

// table is the one place that knows the kinds apart.
var table = [...]row{
	AllReduce:     {"allreduce", true, false, AllReduce, none, wholeCount, wholeCount, twiceOver},
	ReduceScatter: {"reducescatter", true, false, AllGather, perRank, chunks, chunk, others},
	AllGather:     {"allgather", false, false, ReduceScatter, perRank, chunk, chunks, others},
	AllToAll:      {"alltoall", false, false, AllToAll, perPair, sent, received, others},
	Broadcast:     {"broadcast", false, true, Reduce, none, onRoot(wholeCount), wholeCount, one},
	Reduce:        {"reduce", true, true, Broadcast, none, wholeCount, onRoot(wholeCount), one},
	Gather:        {"gather", false, true, Scatter, perRank, chunk, onRoot(chunks), others},
	Scatter:       {"scatter", false, true, Gather, perRank, onRoot(chunks), chunk, others},
}

var ops = [...]string{Sum: "sum", Avg: "avg", Prod: "prod", Min: "min", Max: "max"}

var associations = [...]string{InRankOrder: "in rank order", Tree: "tree"}

var algorithms = [...]string{Auto: "auto", OneShot: "one-shot", TwoShot: "two-shot"}

// Kinds lists every Kind.
func Kinds() (all []Kind) {
	for k := range len(table) {
		if Kind(k).Valid() {
			all = append(all, Kind(k))
		}
	}
	return all
}

// ReduceOps lists every ReduceOp.
func ReduceOps() []ReduceOp { return []ReduceOp{Sum, Avg, Prod, Min, Max} }

// Valid reports whether k is one of the listed kinds.
func (k Kind) Valid() bool { return k >= AllReduce && int(k) < len(table) }

// Reduces reports whether the kind combines values, so that Op matters.
func (k Kind) Reduces() bool { return k.Valid() && table[k].reduces }

// Rooted reports whether the kind has a root.
func (k Kind) Rooted() bool { return k.Valid() && table[k].rooted }

// BusFactor is nccl-tests' factor for bytes/time when it compares kinds and rank counts: the share
// of the bytes that crosses the busiest link. It is 0 for an invalid kind.
func (k Kind) BusFactor(size int) float64 {
	if !k.Valid() {
		return 0
	}
	return table[k].busFactor(size)
}

// String returns the name: "allreduce".
func (k Kind) String() string {
	if !k.Valid() {
		return fmt.Sprintf("Kind(%d)", uint8(k))
	}
	return table[k].name
}

// ParseKind is the inverse of String.
func ParseKind(name string) (Kind, error) {
	plain := strings.NewReplacer("-", "", "_", "").Replace(name)
	for _, k := range Kinds() {
		if table[k].name == plain {
			return k, nil
		}
	}
	return 0, fmt.Errorf("%w: unknown collective %q: use one of %v", ErrArgument, name, Kinds())
}

// Valid reports whether o is one of the listed reductions.
func (o ReduceOp) Valid() bool { return int(o) < len(ops) }

// String returns the name: "sum".
func (o ReduceOp) String() string {
	if !o.Valid() {
		return fmt.Sprintf("ReduceOp(%d)", uint8(o))
	}
	return ops[o]
}

// ParseReduceOp is the inverse of String.
func ParseReduceOp(name string) (ReduceOp, error) {
	if i := slices.Index(ops[:], name); i >= 0 {
		return ReduceOp(i), nil
	}
	return 0, fmt.Errorf("%w: unknown reduction %q: use one of %v", ErrArgument, name, ReduceOps())
}

// String returns the name: "tree".
func (a Association) String() string {
	if int(a) >= len(associations) {
		return fmt.Sprintf("Association(%d)", uint8(a))
	}
	return associations[a]
}

// String returns the name: "two-shot".
func (a Algorithm) String() string {
	if int(a) >= len(algorithms) {
		return fmt.Sprintf("Algorithm(%d)", uint8(a))
	}
	return algorithms[a]
}

// String returns the call as errors and traces print it: "reduce(sum, root 0)".
func (c Collective) String() string {
	var args []string
	if c.Kind.Reduces() {
		args = append(args, c.Op.String())
	}
	if c.Association != InRankOrder {
		args = append(args, c.Association.String())
	}
	if c.Kind.Rooted() {
		args = append(args, fmt.Sprintf("root %d", c.Root))
	}
	if c.Splits != nil {
		args = append(args, "uneven")
	}
	if c.Rows != nil {
		args = append(args, "in rows")
	}
	if c.AllowHalf != 0 {
		args = append(args, fmt.Sprintf("as %v", c.AllowHalf))
	}
	if len(args) == 0 {
		return c.Kind.String()
	}
	return fmt.Sprintf("%v(%s)", c.Kind, strings.Join(args, ", "))
}

// Check validates a call of rank r among P ranks, without communicating, and
// returns its count: the elements of one even chunk, or of the whole operand
// where there are no chunks, or of all chunks together where they are uneven.
// The count must agree between the ranks.
//
// src and dst may be in place: the same buffer for AllReduce, Reduce and
// Broadcast, and for the others (not AllToAll) the smaller buffer at the
// place of rank r's chunk in the larger one. Any other overlap is an error, as
// are lengths, dtypes, splits and roots that do not fit. Every error is
// ErrArgument.
func (c Collective) Check(r, P int, dst, src Buffer) (count int, err error) {
	return c.check(r, P, dst, src)
}

// check is Check without a copy of c.
func (c *Collective) check(r, P int, dst, src Buffer) (count int, err error) {
	// This is the most frequent call, and is checked several times on its way to a device: time
	// counts.
	if c.Kind == AllReduce && c.Op.Valid() && c.Association == InRankOrder && c.Algorithm == Auto &&
		c.AllowHalf == 0 && c.Splits == nil && uint64(c.State) <= math.MaxUint32 &&
		dst.dtype == src.dtype && src.dtype.Valid() && dst.n == src.n && dst.named() &&
		src.named() && (dst.Addr() == src.Addr() || !dst.overlaps(src)) {
		return src.n, nil
	}
	return c.checkAny(r, P, dst, src)
}

// checkAny is Check of any call.
func (c *Collective) checkAny(r, P int, dst, src Buffer) (count int, err error) {
	if err := c.valid(P); err != nil {
		return 0, err
	}
	count, wantSrc, wantDst := src.n, src.n, src.n
	if src.n < 0 || dst.n < 0 {
		return 0, fmt.Errorf("%w: %v: source and destination of rank %d have %d and %d elements",
			ErrArgument, *c, r, src.n, dst.n)
	}
	switch {
	case c.Kind == AllReduce && c.Splits != nil:
		count, wantSrc, wantDst = dst.n, len(c.Branches(nil, r))*dst.n, dst.n
		if src.dtype.Float() && src.dtype.Size() == 2 {
			return 0, fmt.Errorf("%w: %v: sums of branches in %v were rounded, so they add up to "+
				"no fixed bits: use F32", ErrArgument, *c, src.dtype)
		}
	case c.Kind != AllReduce: // which need not ask the table
		t := &table[c.Kind]
		if count, err = c.count(t, r, P, dst, src); err != nil {
			return 0, err
		}
		wantSrc, wantDst = t.src(c.layout(), r, P, count), t.dst(c.layout(), r, P, count)
	}
	if c.AllowHalf != 0 && src.dtype != F32 {
		return 0, fmt.Errorf("%w: %v: %v does not travel in 16 bits, only f32 does", ErrArgument,
			*c, src.dtype)
	}
	if wantSrc >= 0 && src.n != wantSrc {
		return 0, fmt.Errorf("%w: %v: source of rank %d has %d elements, want %d", ErrArgument, *c,
			r, src.n, wantSrc)
	}
	if wantDst >= 0 && dst.n != wantDst {
		return 0, fmt.Errorf("%w: %v: destination of rank %d has %d elements, want %d", ErrArgument,
			*c, r, dst.n, wantDst)
	}
	if wantSrc >= 0 && !src.named() || wantDst >= 0 && !dst.named() {
		return 0, fmt.Errorf("%w: %v: a buffer of rank %d is a nil pointer", ErrArgument, *c, r)
	}
	if c.Rows != nil {
		if err := c.checkRows(P, count); err != nil {
			return 0, err
		}
	}
	if wantSrc >= 0 && wantDst >= 0 {
		return count, c.checkPair(r, P, count, dst, src)
	}
	if !c.DType(dst, src).Valid() {
		return 0, fmt.Errorf("%w: %v: buffer has no valid dtype", ErrArgument, *c)
	}
	return count, nil
}

// valid checks what does not depend on the buffers.
func (c *Collective) valid(P int) error {
	switch {
	case !c.Kind.Valid():
		return fmt.Errorf("%w: unknown collective %v", ErrArgument, c.Kind)
	case c.Kind.Reduces() && !c.Op.Valid():
		return fmt.Errorf("%w: %v: unknown reduction %v", ErrArgument, c.Kind, c.Op)
	case c.Kind.Rooted() && (c.Root < 0 || c.Root >= P):
		return fmt.Errorf("%w: %v: root %d is out of range: there are %d ranks, 0 to %d",
			ErrArgument, c.Kind, c.Root, P, P-1)
	case int(c.Association) >= len(associations):
		return fmt.Errorf("%w: %v: unknown association %v", ErrArgument, c.Kind, c.Association)
	case c.Association != InRankOrder && (!c.Kind.Reduces() || c.Op != Sum && c.Op != Avg):
		return fmt.Errorf("%w: %v: only sums and averages have an association", ErrArgument, *c)
	case c.Association != InRankOrder && c.AllowHalf != 0:
		return fmt.Errorf("%w: %v: what is rounded on its way has no fixed bits: leave out "+
			"AllowHalf", ErrArgument, *c)
	case int(c.Algorithm) >= len(algorithms):
		return fmt.Errorf("%w: %v: unknown algorithm %v", ErrArgument, c.Kind, c.Algorithm)
	case c.AllowHalf != 0 && (c.Kind != AllReduce || c.Op != Sum && c.Op != Avg ||
		c.AllowHalf != F16 && c.AllowHalf != BF16):
		return fmt.Errorf("%w: %v: only sums and averages by all-reduce travel in 16 bits",
			ErrArgument, *c)
	case c.Rows != nil && (c.Kind != AllToAll || len(c.Rows.Src) != P || len(c.Rows.Dst) != P):
		return fmt.Errorf("%w: %v: rows are for an all-to-all, with a number for each of %d ranks",
			ErrArgument, c.Kind, P)
	case uint64(c.State) > math.MaxUint32: // or negative
		return fmt.Errorf("%w: %v: state %d: use a number from 1 to %d for an operand that "+
			"wrappers keep state of, or 0", ErrArgument, *c, c.State, uint32(math.MaxUint32))
	}
	if c.Splits == nil {
		return nil
	}
	want, least := table[c.Kind].splits(P), 0
	if c.Kind == AllReduce && c.Association == Tree && c.Op == Sum {
		want, least = P, 1
	}
	if want == 0 {
		return fmt.Errorf("%w: %v has no chunks, so it takes no splits", ErrArgument, c.Kind)
	}
	if len(c.Splits) != want {
		return fmt.Errorf("%w: %v among %d ranks takes %d splits, got %d", ErrArgument, c.Kind, P,
			want, len(c.Splits))
	}
	all := 0
	for i, n := range c.Splits {
		if n < least {
			return fmt.Errorf("%w: %v: split %d is %d: it must be at least %d", ErrArgument, c.Kind,
				i, n, least)
		}
		if all += n; all < 0 {
			return fmt.Errorf("%w: %v: the splits add up to more elements than there can be",
				ErrArgument, c.Kind)
		}
	}
	return nil
}

// checkRows checks that every piece has an equal part in each row.
func (c *Collective) checkRows(P, count int) error {
	for s, src := range c.Rows.Src {
		for r, dst := range c.Rows.Dst {
			n := count
			if c.Splits != nil {
				n = c.Splits[s*P+r]
			}
			if src < 1 || dst < 1 || n%src != 0 || n%dst != 0 {
				return fmt.Errorf("%w: %v: the %d elements from rank %d to rank %d do not divide "+
					"into %d rows of the source and %d of the destination", ErrArgument, *c, n, s,
					r, src, dst)
			}
		}
	}
	return nil
}

// count derives the count from whichever buffer this rank must pass.
func (c *Collective) count(t *row, r, P int, dst, src Buffer) (int, error) {
	if c.Splits != nil {
		return sum(c.Splits), nil
	}
	n, f := src.n, t.src
	if f(c.layout(), r, P, 1) < 0 {
		n, f = dst.n, t.dst
	}
	per := f(c.layout(), r, P, 1) // elements for each element of the count: 1 or P
	if n%per != 0 {
		return 0, fmt.Errorf("%w: %v: %d elements do not divide into %d equal chunks: pass splits",
			ErrArgument, *c, n, P)
	}
	return n / per, nil
}

// checkPair checks the dtypes and the overlap of a source and a destination
// that are both used.
func (c *Collective) checkPair(r, P, count int, dst, src Buffer) error {
	if !src.dtype.Valid() || src.dtype != dst.dtype {
		return fmt.Errorf("%w: %v: source is %v, destination is %v: they must be the same dtype",
			ErrArgument, *c, src.dtype, dst.dtype)
	}
	if !dst.overlaps(src) || dst.same(src) && c.Kind == AllReduce {
		return nil
	}
	lo, hi := c.Chunk(r, P, count)
	inPlace := false
	switch {
	case c.Kind == AllToAll:
		inPlace = P == 1 && dst.same(src)
	case src.n >= dst.n && hi <= src.n:
		inPlace = src.Slice(lo, hi).same(dst)
	case hi <= dst.n:
		inPlace = dst.Slice(lo, hi).same(src)
	}
	if !inPlace {
		return fmt.Errorf("%w: %v: source and destination overlap, but not as an in-place call "+
			"of rank %d", ErrArgument, *c, r)
	}
	return nil
}

// DType returns the dtype of a call, which is the dtype of the buffer that every rank passes: the
// destination of a Broadcast or Scatter, the source otherwise.
func (c Collective) DType(dst, src Buffer) DType { return c.dtype(&dst, &src) }

// dtype is DType without copies.
func (c *Collective) dtype(dst, src *Buffer) DType {
	if c.Kind == Broadcast || c.Kind == Scatter {
		return dst.dtype
	}
	return src.dtype
}

// Chunk returns where the chunk of rank r lies in the operand that holds every
// chunk, in elements; for kinds without chunks that is the whole operand. For
// AllToAll use [Collective.Pair].
func (c Collective) Chunk(r, P, count int) (lo, hi int) {
	switch {
	case table[c.Kind].splits(P) == 0:
		return 0, count
	case c.Splits == nil:
		return r * count, (r + 1) * count
	}
	lo = sum(c.Splits[:r])
	return lo, lo + c.Splits[r]
}

// Pair returns the elements that rank s sends to rank r in an AllToAll: n elements at offset from
// in the source of s, which land at offset to in the destination of r. With Rows, from and to are
// where they would lie without Rows.
func (c Collective) Pair(s, r, P, count int) (n, from, to int) {
	if c.Splits == nil {
		return count, r * count, s * count
	}
	for i := range r {
		from += c.Splits[s*P+i]
	}
	for i := range s {
		to += c.Splits[i*P+r]
	}
	return c.Splits[s*P+r], from, to
}

// Adjoint returns the collective that carries gradients backward, and the factor to scale its
// result by. By convention the loss is the sum of the ranks' losses. Results on ranks other than
// root count as zeros, so every kind is a total linear map.
//
// Sum, Avg and the kinds that only move data are linear. Max, Min and Prod are
// not: the error is ErrUnsupported.
func (c Collective) Adjoint(P int) (adj Collective, scale float64, err error) {
	scale = 1
	if c.Kind.Reduces() {
		switch c.Op {
		case Sum:
		case Avg:
			scale = 1 / float64(P)
		default:
			return Collective{}, 0, fmt.Errorf("%w: %v is not linear, so it has no adjoint",
				ErrUnsupported, c)
		}
	}
	if c.Kind == AllReduce && c.Splits != nil {
		return Collective{}, 0, fmt.Errorf("%w: %v of branches has no adjoint", ErrUnsupported, c)
	}
	adj = Collective{Kind: table[c.Kind].adjoint, Root: c.Root, Splits: c.Splits, Exact: c.Exact,
		State: c.State}
	switch {
	case c.Kind == AllReduce:
		adj.Op, adj.Association, scale = c.Op, c.Association, 1
	case c.Kind == AllToAll && c.Splits != nil:
		adj.Splits = make([]int, P*P)
		for s := range P {
			for r := range P {
				adj.Splits[r*P+s] = c.Splits[s*P+r]
			}
		}
	}
	if c.Rows != nil {
		adj.Rows = &Rows{Src: c.Rows.Dst, Dst: c.Rows.Src}
	}
	return adj, scale, nil
}

// Even divides n elements among P ranks as evenly as whole elements allow: the first n%P ranks get
// one more. Every rank assumes this split when none is given and P does not divide n.
func Even(n, P int) []int {
	splits := make([]int, P)
	for r := range splits {
		splits[r] = n / P
		if r < n%P {
			splits[r]++
		}
	}
	return splits
}

func sum(xs []int) int {
	n := 0
	for _, x := range xs {
		n += x
	}
	return n
}
