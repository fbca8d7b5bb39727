package autograd

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"slices"
	"strings"

	"gorgonia.org/gorgonia"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/files"
	"github.com/euryale-ml/euryale/internal/stock"
	"github.com/euryale-ml/euryale/internal/terms"
)

// The first buckets are small, so that communication begins early in the
// backward pass; later ones are large, to spread its cost. The sizes are as in
// PyTorch's DDP (VLDB 2020, section 4.2).
const (
	firstBucket = 1 << 20
	restBuckets = 25 << 20
)

type options struct {
	op          backend.ReduceOp
	first, rest int  // bytes
	partial     bool // parameters are averaged, not gradients
	unused      bool // parameters without a gradient count as zeros
	compress    func(backend.Communicator) (backend.Communicator, error)
	random      Random // nil if those of the graph are kept
	frozen      gorgonia.Nodes
	apart       gorgonia.Nodes // in other buckets than the rest
	early       gorgonia.Nodes // in buckets that come first
	tables      []Table
	parts       *parts // nil if ranks have whole parameters
	inTree      bool   // gradients of micro-batches are added in a tree
	tree        int    // of so many
	mirrors     *holding
	notice      func(text string)
	store       []files.Opener // of checkpoints that are not on a disk
	missing     error          // nil arguments of options, and others
	given       []string
}

// once notes an option of which the last one alone would count.
func (o *options) once(option string) {
	if slices.Contains(o.given, option) {
		o.missing = errors.Join(o.missing, fmt.Errorf("%w: autograd.%s is given twice: leave one "+
			"of them out", backend.ErrArgument, option))
	}
	o.given = append(o.given, option)
}

// refuseNil notes that the argument of an option is nil.
func (o *options) refuseNil(option, name string, argument any) {
	o.missing = errors.Join(o.missing, backend.Given("autograd."+option, name, argument))
}

func (o options) check() error {
	switch {
	case o.first < 1 || o.rest < 1:
		return fmt.Errorf("buckets of %d and %d bytes: they must hold at least 1", o.first, o.rest)
	case o.partial && o.op == backend.Sum:
		return errors.New("WithPartial averages parameters and sends no gradients, so WithSum " +
			"has no meaning: leave out one of them")
	case o.partial && o.compress != nil:
		return errors.New("WithPartial sends parameters, which must not be compressed, and no " +
			"gradients: leave out WithCompression")
	case o.partial && o.parts != nil:
		return errors.New("WithPartial lets ranks have different parameters, so WithParts has no " +
			"meaning: leave out one of them")
	case o.inTree && (o.partial || o.compress != nil):
		return fmt.Errorf("WithTree: %w: with WithPartial ranks have no common sum, and "+
			"with WithCompression it depends on what each rank has rounded: leave them out",
			backend.ErrArgument)
	}
	return nil
}

// foreign returns an error for a node of an option on buckets that is no parameter.
func (o options) foreign(params []*param) error {
	for _, n := range slices.Concat(o.apart, o.early) {
		if n != nil && !slices.ContainsFunc(params, func(p *param) bool { return p.node == n }) {
			return fmt.Errorf("%w: WithEarly or WithApart: %s is no parameter", backend.ErrArgument,
				stock.Label(n))
		}
	}
	return nil
}

// use is how a communicator trains with the options. Who runs the graph says how often.
func (o options) use(comm backend.Communicator) terms.Use {
	u := terms.Use{Comm: comm, Weight: 1, Tree: o.tree}
	if o.inTree {
		u.Option = "WithTree"
	}
	switch {
	case o.op == backend.Sum:
	case o.inTree:
		u.Weight = 1 / float64(max(1, o.tree))
	default:
		u.Weight = 1 / float64(comm.Size())
	}
	if o.parts != nil {
		u.Parts = o.parts.comm
	}
	return u
}

// describe writes down all that ranks must have in common, a line for each.
func (o options) describe(params []*param, compressor string) string {
	var s strings.Builder
	fmt.Fprintf(&s, "the reduction is %s\n", o.reduction())
	fmt.Fprintf(&s, "the sizes of buckets are %d and %d bytes\n", o.first, o.rest)
	fmt.Fprintf(&s, "partial averaging is %v, parameters may be unused %v\n", o.partial, o.unused)
	fmt.Fprintf(&s, "gradients are compressed by %s\n", compressor)
	if o.mirrors != nil {
		fmt.Fprintln(&s, "ranks have copies of parts of the solver's state")
	}
	fmt.Fprintf(&s, "the number of parameters is %d\n", len(params))
	for _, p := range params {
		apart := ""
		if p.apart {
			apart = ", in a bucket apart"
		}
		if p.early {
			apart += ", in one of the first buckets"
		}
		fmt.Fprintf(&s, "parameter %d is %v%s\n", p.index, p, apart)
	}
	return s.String()
}

// checkTerms returns an error if the gradients would be wrong: as a graph of package layers says,
// or in a tree of micro-batches because of collectives among the ranks.
func checkTerms(params []*param, u terms.Use) error {
	var last *gorgonia.ExprGraph
	for _, p := range params {
		if p.node.Graph() == last {
			continue
		}
		last = p.node.Graph()
		for _, t := range terms.All(last) {
			if err := t.Check(u); err != nil {
				return err
			}
		}
		if err := checkCollectives(last, u); err != nil {
			return err
		}
	}
	return nil
}

// checkCollectives refuses a tree of micro-batches for a graph with collectives among ranks that
// train together: results would depend on which micro-batches run at the same time, and ranks may
// have different numbers of them.
func checkCollectives(g *gorgonia.ExprGraph, u terms.Use) error {
	if u.Tree == 0 {
		return nil
	}
	for _, n := range g.AllNodes() {
		c, ok := n.Op().(interface{ Comm() backend.Communicator })
		if ok && terms.Share(c.Comm(), u.Comm) {
			return fmt.Errorf("%w: WithTree: node %s (%v) is a collective among ranks that train "+
				"together: a micro-batch would depend on those of other ranks: leave out one of "+
				"them", backend.ErrArgument, stock.Label(n), n.Op())
		}
	}
	return nil
}

// reduction names how gradients are combined, for messages and checkpoints.
func (o options) reduction() string {
	if o.inTree {
		return fmt.Sprintf("%v in a tree of %d micro-batches", o.op, o.tree)
	}
	return o.op.String()
}

// Option changes what [New] makes. Options must be the same on every rank.
type Option func(*options)

// WithSum makes gradients the sum of the ranks' gradients. The default is
// their mean.
func WithSum() Option { return func(o *options) { o.op = backend.Sum } }

// WithBuckets sets the size of the first bucket of each dtype, and that of the others,
// in bytes. A parameter that does not fit begins another bucket, unless the one before
// is at most a sixteenth full, with a bias, say: that bucket then grows beyond its
// size, except with [WithPartial]. The defaults are 1 MiB and 25 MiB. Small buckets
// leave earlier in the backward pass; each costs one all-reduce.
func WithBuckets(first, rest int) Option {
	return func(o *options) { o.first, o.rest = first, rest }
}

// WithApart puts parameters into separate buckets from the rest: a vm.Machine gathers parameters in
// BF16, a bucket at a time, if only products of that precision read them (vm.WithShards).
func WithApart(params ...*gorgonia.Node) Option {
	return func(o *options) {
		o.apart = append(o.apart, params...)
		o.refuseNil("WithApart", "params", params)
	}
}

// WithEarly puts parameters into separate buckets that leave before all others: use it for those
// whose gradients a vm.Machine computes first. It has no effect with [WithParts] or with a
// compression that keeps residuals: see [Buckets.Early].
func WithEarly(params ...*gorgonia.Node) Option {
	return func(o *options) {
		o.early = append(o.early, params...)
		o.refuseNil("WithEarly", "params", params)
	}
}

// WithUnused lets a parameter have no gradient in a step: on this rank the gradient then counts as
// zeros. By default Sync returns an error that names the parameter, since an untrained layer is
// usually a mistake. PyTorch's DDP has find_unused_parameters for this.
func WithUnused() Option { return func(o *options) { o.unused = true } }

// WithCompression sends gradients through the communicator that compress
// returns, which Close closes; parameters are sent uncompressed:
//
//	autograd.WithCompression(half.Wrap(backend.BF16))
//	autograd.WithCompression(sparse.Wrap(sparse.TopK(0.01)))
//
// Each bucket has its own State key, so that package sparse keeps a residual for
// each. [DataParallel.Comm] has the counters. A checkpoint names the compression by its Describe()
// string, if it has that method, otherwise by its type. It loads only with the same compression, or
// with one whose Resumes(description string) says that it fits. For steps that a NaN spoils, see
// [DataParallel.Sync].
func WithCompression(compress func(backend.Communicator) (backend.Communicator, error)) Option {
	return func(o *options) {
		o.once("WithCompression")
		o.compress = compress
		o.refuseNil("WithCompression", "compress", compress)
	}
}

// WithRandom makes checkpoints keep the step of random, so that a training with random numbers
// resumes with the bits of one that never stopped. The [nn.Random] of the dropouts in the graph is
// kept without this option: use it for random numbers that are drawn elsewhere. New gives all ranks
// the step of rank 0, and returns ErrMismatch if seeds differ. Load sets the step but not the first
// sample, which differs between ranks. It refuses a checkpoint with another seed, or one without
// random numbers.
//
// [nn.Random]: https://pkg.go.dev/github.com/euryale-ml/euryale/ops/nn#Random
func WithRandom(random Random) Option {
	return func(o *options) {
		o.once("WithRandom")
		o.random = random
		o.refuseNil("WithRandom", "random", random)
	}
}

// WithFrozen declares that variables are part of the model although nothing trains them, such as
// the layers of a pretrained network that are not fine-tuned, or random projections. New gives all
// ranks the values of rank 0, Check and Hash cover them, and checkpoints keep them.
//
// Variables that are neither parameters nor frozen are data of each rank, such as images and
// labels: these functions do not read or write them. A variable does not show whether it is data,
// since both are bound by Let, by WithValue or in place. So declare each frozen one, in the same
// order on every rank. Nodes are variables with contiguous values on the host, of any dtype that
// communicators take but those of 16 bits: nothing may write what is mapped of a file.
func WithFrozen(variables ...*gorgonia.Node) Option {
	return func(o *options) {
		o.frozen = append(o.frozen, variables...)
		o.refuseNil("WithFrozen", "variables", variables)
	}
}

// WithNotice sets the function that reports what a user should know, in place of standard error:
// that ranks have trained without Sync, a variable with a gradient that [New] was not given, random
// numbers that a checkpoint cannot keep, what an old checkpoint lacks, a checkpoint that Load
// passes over because it is damaged, and an older one that Save cannot remove. Rank 0 reports each
// notice once. Ranks may have different functions. say must not call the DataParallel, or the
// machine of package vm that reports: both may hold their locks meanwhile.
func WithNotice(say func(text string)) Option {
	return func(o *options) { o.notice = say; o.refuseNil("WithNotice", "say", say) }
}

// WithStore lets Save, SaveAsync, TrySave, Load and Pinned take the URLs of directories that are
// not on a disk, which open opens:
//
//	autograd.WithStore(bucket.Open)
//	err := dp.Save("s3://bucket/run1", solver, progress)
//
// The file system that open returns has the files of one URL, each with ReadAt. To save, it also
// needs Create(name string, put func(io.Writer) error) error, which makes a file once put has
// returned, and an fs.ErrExist if there is one; Replace, the same for a file that may be there; and
// Remove(name string) error. All ranks open the directory, and rank 0 says once that nothing locks
// it.
func WithStore(open func(url string) (fs.FS, error)) Option {
	return func(o *options) {
		o.once("WithStore")
		o.store = []files.Opener{open}
		o.refuseNil("WithStore", "open", open)
	}
}

// toStandardError is the default of WithNotice.
func toStandardError(text string) { fmt.Fprintln(os.Stderr, "euryale:", text) }

// WithPartial makes every rank apply its own gradients, and then average a part
// of the parameters with the others: one bucket in each step, in turn
// ([DataParallel.Average]). A step sends as many bytes as one bucket has, and
// ranks differ in the parameters that have not been averaged since. Solver state,
// such as momentum, stays separate on each rank. It is local SGD with rotating
// averages, the backward_and_partial_update of Apache SINGA. That one did not
// average all parameters before training ended, and no test checked it.
func WithPartial() Option { return func(o *options) { o.partial = true } }

// WithParts declares that some parameters are parts of larger ones that the ranks of comm shard:
// tensor parallelism. axes has the axis along which each is sharded, by the name of its node; all
// other parameters are the same on all ranks of comm. Parts may have different lengths, and are in
// rank order.
//
//	vm.WithDataParallel(data, autograd.WithParts(tensor, map[string]int{"w": 0}))
//
// For graphs of package layers use layers.Builder.Training, which has it.
//
// A checkpoint has the whole parameters and the whole state of the solver, in shards of all ranks
// if the data-parallel ranks shard them (vm.WithShards). Ranks with other parts, or with no parts,
// can load it. [DataParallel.Hash] covers the whole model, and the norm of vm.ClipNorm counts each
// element once. [DataParallel.Check] also compares what is the same on all ranks of comm.
//
// The ranks of comm have the same rank in the communicator of New. New, Save, Load, Check and Hash
// are collective over both communicators. comm must stay open until Close.
//
// Errors: ErrArgument for a name that no parameter has, or an axis that it does not have;
// [backend.ErrMismatch] if ranks of comm have other parameters. If comm has more than one rank,
// Save and Load return ErrUnsupported with a compression that keeps residuals, and with solvers of
// other packages.
func WithParts(comm backend.Communicator, axes map[string]int) Option {
	return func(o *options) {
		o.once("WithParts")
		if o.refuseNil("WithParts", "comm", comm); o.missing == nil {
			o.parts = &parts{comm: comm, axes: axes}
		}
	}
}

// WithTables makes checkpoints keep tables that the ranks of the communicator of New shard. Each
// rank saves its rows in one file; ranks of any number load them. [DataParallel.Check] and
// Hash leave tables out, and so do files of weights alone ([SaveWeights]).
func WithTables(tables ...Table) Option {
	return func(o *options) {
		o.tables = append(o.tables, tables...)
		o.refuseNil("WithTables", "tables", tables)
		for i := 0; i < len(o.tables) && o.missing == nil; i++ {
			named := func(t Table) bool { return t.Name() == o.tables[i].Name() }
			if slices.IndexFunc(o.tables, named) < i {
				o.missing = fmt.Errorf("WithTables: %w: two tables have the name %q",
					backend.ErrArgument, o.tables[i].Name())
			}
		}
	}
}

// WithTree is an option of machines: vm.WithTree gives it to New, and Sync returns ErrUnsupported.
// A step has n micro-batches, of which each rank runs consecutive ones ([TreeShare]), rank 0 the
// first. All n gradients are added in the tree of [backend.Tree] and divided by n (not with
// [WithSum]), so training gives bitwise identical results on any number of ranks.
//
// Between ranks a sum in a tree costs as much as any other if n/P is a power of two for P ranks.
// Otherwise a rank's micro-batches form several branches of the tree, at most 2*log2(n): buckets
// are that many times larger, and the rank sends all branches.
//
// New returns ErrArgument for numbers that TreeShare refuses, with [WithPartial] and with
// [WithCompression], and ErrUnsupported if the communicator does not add parameters of their type
// in a tree ([backend.Capabilities]).
func WithTree(n int) Option {
	return func(o *options) {
		o.once("WithTree")
		o.tree, o.inTree = n, true
	}
}

// withMirrors is an option of machines with vm.WithShards: an [Elastic] gives it to Enter. P ranks
// divide each bucket into P/2 parts, rounded down, and each part has two ranks or three, on
// different machines if it can: each updates it from the gradients that all have, and so has what
// the other one has, without any exchange. New gives all ranks each part of the parameters from a
// rank that has it, and the Elastic does so with the state.
func withMirrors(h *holding) Option { return func(o *options) { o.mirrors = h } }
