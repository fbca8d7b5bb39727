package autograd

import (
	"cmp"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"slices"
	"strings"

	"gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/euryale-ml/euryale/autograd/internal/checkpoint"
	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/files"
	"github.com/euryale-ml/euryale/internal/kernels"
	"github.com/euryale-ml/euryale/internal/stock"
	"github.com/euryale-ml/euryale/internal/terms"
)

// SaveWeights writes the values of variables to a safetensors file, which other programs read, such
// as Python's safetensors.numpy.load_file. nodes are the whole model: its learnables, and variables
// that nothing trains. SaveWeights also writes the running statistics of the batch norms in their
// graphs. It needs no solver and no communicator, and is not collective: call it on one rank.
//
// Tensors have the names, shapes and dtypes of their nodes. The averages of a batch norm whose
// scale is a variable named bn are bn.running_mean and bn.running_var, wherever it is in the graph.
//
// The file is written beside path and renamed when it is on the disk, so path always has a whole
// file, the old one or the new one. An existing file is replaced. store opens path if that is a
// URL: see [WithStore].
//
// Values are read on the host: call Machine.Pull first, on all ranks, if a machine of package vm
// trains on a device or with WithShards; they are refused otherwise. [ReadWeights] of a checkpoint
// gives whole learnables where ranks shard them otherwise ([WithParts]).
//
// Errors: ErrArgument for a node that is not a variable or has no value, for one of which a rank
// has a part alone or a device newer elements, and for names that are empty, not UTF-8, or given to
// two nodes; an element that is NaN, or infinite in a variable with a gradient or a running
// statistic; those of the file system.
func SaveWeights(path string, nodes gorgonia.Nodes,
	store ...func(url string) (fs.FS, error)) error {
	if err := saveWeights(path, nodes, store); err != nil {
		return wrapped("save weights to %s: %w", path, err)
	}
	return nil
}

// LoadWeights sets variables in place to the values that a file has for their names, and also sets
// the running statistics of the batch norms in their graphs. path is a file of [SaveWeights] or of
// another program, or a checkpoint of [DataParallel.Save], whose solver state it ignores. It is not
// collective: load before [New], which gives all ranks the model of rank 0, or on all ranks.
//
// The variables and the file must have the same names, in any order. To fine-tune a model with a
// new head, load without the head, or pass [NonStrict]:
//
//	err := autograd.LoadWeights("pretrained.safetensors", body, autograd.NonStrict(nil))
//
// A machine of package vm on a device takes over the values in its next run. If it has trained,
// call its Pull before: variables that are newer there are refused.
//
// Errors: ErrArgument for variables that the file lacks and tensors that no variable has, with
// their names, for other shapes or dtypes, and for nodes that SaveWeights refuses; a damaged file,
// or one with numbers that SaveWeights refuses; those of the file system. After an error nothing
// has changed.
func LoadWeights(path string, nodes gorgonia.Nodes, options ...WeightsOption) error {
	err := backend.Given("", "options", options)
	if err == nil {
		var o weightsOptions
		for _, option := range options {
			option(&o)
		}
		if err = o.missing; err == nil {
			err = o.load(path, nodes)
		}
	}
	if err != nil {
		return wrapped("load weights of %s: %w", path, err)
	}
	return nil
}

// ReadWeights returns, by name, the tensors of a file of [SaveWeights] or of another program, or of
// the newest checkpoint of a directory, without the solver's. Learnables that ranks shard are
// whole. 16-bit floats become Float32. It is not collective.
//
// Errors: any other dtype that Gorgonia lacks; a damaged file, or a checkpoint with a NaN; those of
// the file system.
func ReadWeights(path string, store ...func(url string) (fs.FS, error)) (
	map[string]*tensor.Dense, error) {
	all, err := readWeights(path, store)
	weights := map[string]*tensor.Dense{}
	for name, t := range all {
		if strings.HasPrefix(name, checkpoint.SolverPrefix) || err != nil {
			continue
		}
		if weights[name], err = tensorOf(t); err != nil {
			err = fmt.Errorf("tensor %q: %w", name, err)
		}
	}
	if err != nil {
		return nil, wrapped("read weights of %s: %w", path, err)
	}
	return weights, nil
}

// ReadProgress unmarshals the progress of a checkpoint, or of the newest one in a directory: see
// [DataParallel.Save]. It is not collective. store opens path if that is a URL: see [WithStore].
//
// Errors: [backend.ErrArgument] if it has none; those of the file system and of Unmarshal.
func ReadProgress(path string, progress any, store ...func(url string) (fs.FS, error)) error {
	err := backend.Given("", "progress", progress)
	var l loaded
	var in files.Dir
	if err == nil {
		in, err = files.At(path, store...)
	}
	if err == nil {
		in, err = newestIn(in)
	}
	if err == nil {
		l.record, err = readRecord(in)
	}
	if err == nil && l.Progress == nil {
		err = fmt.Errorf("%w: the checkpoint has no progress", backend.ErrArgument)
	}
	if err == nil {
		err = l.unmarshalProgress(progress)
	}
	if err != nil {
		return wrapped("read progress of %s: %w", path, err)
	}
	return nil
}

// tensorOf returns a tensor of Gorgonia.
func tensorOf(t stored) (*tensor.Dense, error) {
	var data any
	switch d := t.Data.DType(); d {
	case backend.F64:
		data = backend.View[float64](t.Data)
	case backend.F32:
		data = backend.View[float32](t.Data)
	case backend.F16, backend.BF16:
		wide := make([]float32, t.Data.Len())
		if err := (kernels.Host{}).Cast(backend.Of(wide), t.Data); err != nil {
			return nil, err
		}
		data = wide
	case backend.I64:
		data = backend.View[int64](t.Data)
	case backend.I32:
		data = backend.View[int32](t.Data)
	case backend.U8:
		data = backend.View[uint8](t.Data)
	default:
		return nil, fmt.Errorf("%w: Gorgonia has no tensors of %v", backend.ErrArgument,
			cmp.Or(t.Other, d.String()))
	}
	return tensor.New(tensor.WithShape(t.Shape...), tensor.WithBacking(data)), nil
}

// WeightsOption changes what [LoadWeights] accepts.
type WeightsOption func(*weightsOptions)

type weightsOptions struct {
	partial bool
	report  func(missing, unexpected []string)
	store   []files.Opener
	missing error // a nil option
}

// NonStrict makes LoadWeights load what the variables and the file have in common, like
// strict=False of PyTorch's load_state_dict. Shapes and dtypes must still agree. report gets the
// names of variables that the file lacks, which keep their values, and of tensors that no variable
// has; it may be nil.
func NonStrict(report func(missing, unexpected []string)) WeightsOption {
	return func(o *weightsOptions) { o.partial, o.report = true, report }
}

// FromStore makes LoadWeights take the URL of a file or a directory that is not on a disk: see
// [WithStore].
func FromStore(open func(url string) (fs.FS, error)) WeightsOption {
	return func(o *weightsOptions) {
		o.store = []files.Opener{open}
		o.missing = backend.Given("autograd.FromStore", "open", open)
	}
}

// LoadOption changes what [DataParallel.Load] restores.
type LoadOption func(*loadOptions)

type loadOptions struct {
	weightsOnly bool
	missing     error // a nil option
}

// WeightsOnly makes Load restore only parameters, variables of [WithFrozen] and running statistics,
// for fine-tuning, say: the program may have a different solver, options and number of ranks than
// the checkpoint. The solver begins anew: a [solver.Solver] forgets its state. So does the count of
// steps that names checkpoints: a new training begins. Residuals of a compression and the step of
// random numbers stay as they are. [LoadWeights] is for models with other parameters, such as a new
// head.
func WeightsOnly() LoadOption { return func(o *loadOptions) { o.weightsOnly = true } }

// loadOptionsOf returns what options say.
func loadOptionsOf(opts []LoadOption) loadOptions {
	o := loadOptions{missing: backend.Given("DataParallel.Load", "opts", opts)}
	for _, opt := range opts {
		if opt != nil {
			opt(&o)
		}
	}
	return o
}

// weights returns the tensors of a file for variables.
func weights(nodes gorgonia.Nodes) (v inventory, err error) {
	if err := backend.Given("", "nodes", nodes); err != nil {
		return v, err
	}
	if len(nodes) == 0 {
		return v, fmt.Errorf("%w: there are no variables", backend.ErrArgument)
	}
	if err := v.freeze(nodes); err != nil {
		return v, err
	}
	for i, n := range nodes {
		v.frozen[i].name = "the variable " + stock.Label(n)
	}
	if err := v.findIn(nodes); err != nil {
		return v, err
	}
	return v, checkNames(v.tensors())
}

// checkWhole returns an error if a node has a part of a learnable that ranks shard.
func checkWhole(nodes gorgonia.Nodes) error {
	var of []*terms.Terms
	for i, n := range nodes {
		if i == 0 || n.Graph() != nodes[i-1].Graph() {
			of = terms.All(n.Graph())
		}
		for _, t := range of {
			if t.Parts[n.Name()] {
				return fmt.Errorf("%w: %s is this rank's part of a learnable, in a layers.Layout "+
					"of %s: save a checkpoint by all ranks (DataParallel.Save), from which "+
					"ReadWeights reads it whole", backend.ErrArgument, stock.Label(n), t.Layout)
			}
		}
	}
	return nil
}

// untrained reports whether a tensor is of a variable without a gradient, such as a mask.
func (v *inventory) untrained(name string) bool {
	return slices.ContainsFunc(v.frozen, func(p piece) bool {
		return p.file == name && p.node.Deriv() == nil
	})
}

func saveWeights(path string, nodes gorgonia.Nodes, store []files.Opener) error {
	v, err := weights(nodes)
	if err == nil {
		err = checkWhole(nodes)
	}
	if err != nil {
		return err
	}
	var all []checkpoint.Tensor
	for _, p := range v.pieces() {
		memory, err := p.memory()
		if err != nil {
			return err
		}
		t := checkpoint.Whole(p.file, p.shape, memory, checkpoint.Common)
		t.Constant = v.untrained(p.file)
		all = append(all, t)
	}
	in, err := files.At(path, store...)
	if err != nil {
		return err
	}
	err = in.Replace(".", func(w io.Writer) error {
		return checkpoint.EncodeTensors(w, all, checkpoint.Remarks{})
	})
	if errors.Is(err, files.ErrNoFile) {
		err = fmt.Errorf("%w: %w: name a file, such as %s", backend.ErrArgument, err,
			in.Path(checkpoint.ModelName))
	}
	return err
}

func (o weightsOptions) load(path string, nodes gorgonia.Nodes) error {
	v, err := weights(nodes)
	if err != nil {
		return err
	}
	all, err := readWeights(path, o.store)
	if err != nil {
		return err
	}
	if err := v.rename(all, func(p piece) string { return p.file }); err != nil && !o.partial {
		return err
	}
	var here, missing []string
	for _, p := range v.pieces() {
		t, ok := all[p.file]
		here = append(here, p.file)
		if ok {
			read := checkpoint.Whole(p.file, t.Shape, t.Data, checkpoint.Common)
			read.Constant = v.untrained(p.file)
			if err := read.CheckFinite(); err != nil {
				return fmt.Errorf("%w: use another file", err)
			}
		}
		switch {
		case !ok:
			missing = append(missing, p.file)
		case t.Data.DType() != p.dtype || !slices.Equal(t.Shape, p.shape):
			return fmt.Errorf("%w: in the file %s is %v%v, in this program %v%v: give the model "+
				"the file's sizes, or leave this one out", backend.ErrArgument, p.file,
				cmp.Or(t.Other, t.Data.DType().String()), tensor.Shape(t.Shape), p.dtype,
				tensor.Shape(p.shape))
		}
	}
	unexpected := slices.DeleteFunc(slices.Sorted(maps.Keys(all)), func(name string) bool {
		return slices.Contains(here, name) || strings.HasPrefix(name, checkpoint.SolverPrefix)
	})
	if err := o.check(missing, unexpected); err != nil {
		return err
	}
	return fill(v.pieces(), func(p piece, _ int) []byte { return all[p.file].Data.Bytes() })
}

// check returns an error unless the model and the file have the same names or may differ.
func (o weightsOptions) check(missing, unexpected []string) error {
	if o.partial {
		if o.report != nil {
			o.report(missing, unexpected)
		}
		return nil
	}
	var wrong []string
	if len(missing) > 0 {
		wrong = append(wrong, "the file has no "+nameList(missing))
	}
	if len(unexpected) > 0 {
		wrong = append(wrong, "no variable is named "+nameList(unexpected)+", which the file has")
	}
	if wrong == nil {
		return nil
	}
	return fmt.Errorf("%w: %s: pass all variables of the model, or NonStrict to load what they "+
		"have in common", backend.ErrArgument, strings.Join(wrong, "; "))
}

// readWeights reads a file, or the model of a checkpoint.
func readWeights(path string, store []files.Opener) (map[string]stored, error) {
	in, err := files.At(path, store...)
	if err != nil {
		return nil, err
	}
	info, err := in.Stat(".")
	if errors.Is(err, fs.ErrNotExist) {
		return nil, fmt.Errorf("%w: name a training's directory, one of its checkpoints, or a "+
			"file of safetensors", err)
	}
	if err != nil || !info.IsDir() {
		all, err2 := checkpoint.ReadTensors(in, ".")
		return all, cmp.Or(err, err2)
	}
	for {
		of, err := newestIn(in)
		if err != nil {
			return nil, err
		}
		all, err := readCheckpoint(of)
		_, gone := of.Stat(checkpoint.RecordName)
		if err == nil || !errors.Is(gone, fs.ErrNotExist) {
			return all, err
		} // else a Save has removed it
	}
}

// readCheckpoint reads the model of a checkpoint.
func readCheckpoint(in files.Dir) (map[string]stored, error) {
	r, err := readRecord(in)
	if err != nil {
		return nil, err
	}
	model := func(name string) bool { return !strings.HasPrefix(name, checkpoint.SolverPrefix) }
	all, err := checkpoint.Read(in, r.Stamp, r.Shards,
		checkpoint.Wanted{Rest: model, Constants: true})
	if r.Format == numberedFormat {
		all = unnumbered(all)
	}
	return all, err
}

// newestIn returns the newest checkpoint of a directory, or the directory if it is one.
func newestIn(in files.Dir) (files.Dir, error) {
	all, err := checkpoint.List(in)
	if err != nil {
		return in, err
	}
	if len(all) == 0 {
		return in, fmt.Errorf("%w: it has no checkpoint: name another directory, or a file",
			fs.ErrNotExist)
	}
	if all[0].Wrong != nil {
		return in, fmt.Errorf("%w, or name one in %s", all[0].Wrong, in.Path(""))
	}
	return in.Sub(all[0].Dir), nil
}

// unnumbered gives the weights in a file of format 1 the names that they have today.
func unnumbered(numbered map[string]stored) map[string]stored {
	all := map[string]stored{}
	for key, t := range numbered {
		kind, rest, _ := strings.Cut(key, ".")
		_, name, _ := strings.Cut(rest, ".")
		switch kind + "." {
		case parameterPrefix, frozenPrefix:
			all[name] = t
		case averagePrefix:
			all[key] = t
		}
	}
	return all
}
