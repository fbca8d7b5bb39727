package autograd

import (
	"bytes"
	"encoding"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"reflect"
	"slices"
	"strings"

	"gorgonia.org/tensor"

	"github.com/euryale-ml/euryale/autograd/internal/checkpoint"
	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/files"
	"github.com/euryale-ml/euryale/internal/safetensors"
)

// record describes a checkpoint.
type record struct {
	checkpoint.Stamp
	Format      int    `json:"format"`
	Ranks       int    `json:"ranks"`
	Solver      string `json:"solver"`
	Partial     bool   `json:"partial"`
	Turn        int    `json:"turn"` // of partial averaging
	Compression bool   `json:"compression"`
	// elements, where residuals or turns belong to them
	Buckets  []int        `json:"buckets,omitempty"`
	Random   *randomState `json:"random,omitempty"`
	Frozen   int          `json:"frozen,omitempty"`   // variables of WithFrozen
	Averages int          `json:"averages,omitempty"` // running statistics of batch norms
	Tables   []string     `json:"tables,omitempty"`   // of WithTables
	Shards   int          `json:"shards,omitempty"`   // files of ranks that shard all of them
	// of parameters, where buckets are compared
	Order    []string        `json:"order,omitempty"`
	Progress json.RawMessage `json:"progress,omitempty"`
	origin

	numbered string // the solver, as in format 1
}

// origin is missing in checkpoints of older versions.
type origin struct {
	Parameters   int    `json:"parameters,omitempty"`
	Reduction    string `json:"reduction,omitempty"`
	CompressedBy string `json:"compressed_by,omitempty"`
}

// stored is a tensor in a file.
type stored = safetensors.Tensor

// randomState is what a checkpoint has of a [Random].
type randomState struct {
	Seed  uint32 `json:"seed"`
	Step  uint64 `json:"step"`
	Found bool   `json:"found,omitempty"` // in a graph, not given by WithRandom
}

// found reports whether there are random numbers that no option asked to keep.
func (s *randomState) found() bool { return s != nil && s.Found }

// String says which random numbers a program has, whatever their step.
func (s *randomState) String() string {
	if s == nil {
		return "the step of no random numbers is kept (WithRandom)"
	}
	return fmt.Sprintf("the seed of random numbers is %d", s.Seed)
}

// The formats of checkpoints: in the older one, tensors have their keys as names (see namedTensor).
const (
	numberedFormat = 1
	namedFormat    = 2
)

// fits returns an error if a program cannot resume from a checkpoint. want is what the program
// would write.
func (r record) fits(want record) error {
	if r.origin == (origin{}) {
		want.origin = r.origin // unknown
	}
	if r.Format == numberedFormat {
		want.Format, want.Solver, want.Order = r.Format, want.numbered, r.Order
	}
	r.Solver = today(r.Solver)
	if r.Random == nil && want.Random.found() || want.Random == nil && r.Random.found() {
		r.Random, want.Random = nil, nil // sayMissing says so
	}
	has, wants := r.terms(), want.terms()
	for i := range has {
		if has[i] != wants[i] {
			instead := "load its weights alone (WeightsOnly)"
			if r.Parameters != want.Parameters {
				instead = "load what both have in common (LoadWeights with NonStrict)"
			}
			return fmt.Errorf("%w: in the checkpoint %s, in this program %s: give the program "+
				"what the checkpoint has, %s, or load another checkpoint",
				backend.ErrArgument, has[i], wants[i], instead)
		}
	}
	return r.fitsRanks(want)
}

// inFile is how a checkpoint names a kind of solver: there, solvers are of package autograd.
func inFile(kind string) string { return strings.ReplaceAll(kind, "*solver.", "*autograd.") }

// today is the kind of a solver that a checkpoint names. In older ones an SGD could be a value.
func today(named string) string {
	named = strings.ReplaceAll(strings.ReplaceAll(named, "*autograd.SGD", "autograd.SGD"),
		"autograd.SGD", "*autograd.SGD")
	return strings.ReplaceAll(named, "*autograd.", "*solver.")
}

// fitsRanks returns an error if the number of ranks has changed but must not: state that belongs to
// one rank cannot be given to another.
func (r record) fitsRanks(want record) error {
	if r.Ranks == want.Ranks || len(r.Buckets) == 0 {
		return nil
	}
	what := "the residuals of " + r.CompressedBy
	if r.Partial {
		what = "the parameters and the solver of WithPartial"
	}
	return fmt.Errorf("%w: the checkpoint was written by %d ranks, this program has %d, and %s "+
		"belong to individual ranks: start the program with %d ranks (euryale run -n %d), or load "+
		"another checkpoint",
		backend.ErrArgument, r.Ranks, want.Ranks, what, r.Ranks, r.Ranks)
}

// terms are what a program must have in common with the checkpoints that it loads.
func (r record) terms() []string {
	return []string{
		fmt.Sprintf("the format is %d", r.Format),
		fmt.Sprintf("the solver is a %s", r.Solver),
		fmt.Sprintf("partial averaging is %v", r.Partial),
		fmt.Sprintf("the number of parameters is %d", r.Parameters),
		fmt.Sprintf("the reduction is %s", r.Reduction),
		fmt.Sprintf("gradients are compressed by %s", r.CompressedBy),
		fmt.Sprintf("compression is %v", r.Compression),
		fmt.Sprintf("buckets are of %v elements", r.Buckets),
		fmt.Sprintf("the order of parameters is %s", strings.Join(r.Order, ", ")),
		r.Random.String(),
		fmt.Sprintf("tables are %q", r.Tables),
	}
}

// ofWeights returns the record of this program with the weights that r describes.
func (r record) ofWeights(program record) record {
	program.Format, program.Frozen, program.Averages = r.Format, r.Frozen, r.Averages
	program.Progress, program.Stamp, program.Shards = r.Progress, r.Stamp, r.Shards
	if program.Parameters = r.Parameters; r.Parameters == 0 { // of an older version
		program.origin = origin{}
	}
	return program
}

// readRecord reads the record of a checkpoint.
func readRecord(in files.Dir) (r record, err error) {
	text, stamp, err := checkpoint.ReadRecord(in)
	if err != nil {
		return r, err
	}
	if err := json.Unmarshal(text, &r); err != nil {
		return r, fmt.Errorf("%s: %w", in.Path(checkpoint.RecordName), err)
	}
	r.Stamp = stamp
	return r, nil
}

// loaded is what a rank has read of a checkpoint.
type loaded struct {
	record
	model, own  map[string]stored
	tables      []map[string]backend.Buffer
	weightsOnly bool // all else stays as it is
}

// tableFiles begins the names of what tables have in files.
const tableFiles = "table/"

// describe lists what the parts of the ranks must have in common: names, dtypes and shapes.
func (l loaded) describe() string {
	var s strings.Builder
	fmt.Fprintf(&s, "the checkpoint is of %v\n", l.Stamp)
	for _, name := range slices.Sorted(maps.Keys(l.own)) {
		shape := l.own[name].Shape
		if strings.HasPrefix(name, tableFiles) { // whose rows ranks shard, some have one more
			shape = shape[min(1, len(shape)):]
		}
		fmt.Fprintf(&s, "in the rank's own file is %s %v%v\n", name, l.own[name].Data.DType(),
			shape)
	}
	return s.String()
}

// fits returns an error for a tensor of a checkpoint that is not what a program has.
func fits(what string, t stored, d backend.DType, shape []int) error {
	if t.Data.DType() == d && slices.Equal(t.Shape, shape) {
		return nil
	}
	return fmt.Errorf("%w: in the checkpoint %s is %v%v, in this program %v%v: give the model the "+
		"checkpoint's sizes, or load another checkpoint", backend.ErrArgument, what,
		t.Data.DType(), tensor.Shape(t.Shape), d, tensor.Shape(shape))
}

// checkProgress unmarshals the progress into another value of the program's type, which must have
// all of its fields, unless that type unmarshals itself: its method may rely on a constructor.
func (l loaded) checkProgress(progress any) error {
	if progress == nil {
		return nil
	}
	if l.Progress == nil {
		return fmt.Errorf("%w: the checkpoint has no progress: pass nil", backend.ErrArgument)
	}
	if _, own := progress.(json.Unmarshaler); own {
		return nil
	}
	v := reflect.ValueOf(progress)
	if v.Kind() == reflect.Pointer && !v.IsNil() { // else Unmarshal says that it must be
		progress = reflect.New(v.Type().Elem()).Interface()
	}
	if err := l.unmarshalProgress(progress); err != nil {
		return err
	}
	all := json.NewDecoder(bytes.NewReader(l.Progress))
	all.DisallowUnknownFields()
	if err := all.Decode(progress); err != nil {
		return fmt.Errorf("%w: the progress that was saved has more than this program's %T (%w): "+
			"give a renamed field its old name by a tag of json, and one that is not wanted any "+
			"more the type json.RawMessage", backend.ErrArgument, progress, err)
	}
	return nil
}

func (l loaded) unmarshalProgress(progress any) error {
	if progress == nil {
		return nil
	}
	if err := json.Unmarshal(l.Progress, progress); err != nil {
		return fmt.Errorf("progress: %w", err)
	}
	return nil
}

// marshal returns progress as JSON, which has no NaN and no infinities.
func marshal(progress any) (json.RawMessage, error) {
	text, err := json.Marshal(progress)
	if errors.As(err, new(*json.UnsupportedValueError)) {
		err = fmt.Errorf("%w: JSON has no such number: leave it out, or keep it as text (%w)",
			backend.ErrArgument, err)
	}
	return text, err
}

// leftOut returns an error for a field that JSON leaves out of a value because its name is not
// exported: it would be zero after Load. Locks, functions and channels have nothing to keep.
func leftOut(t reflect.Type, seen map[reflect.Type]bool) error {
	if seen[t] || t.Implements(reflect.TypeFor[json.Marshaler]()) ||
		t.Implements(reflect.TypeFor[encoding.TextMarshaler]()) ||
		reflect.PointerTo(t).Implements(reflect.TypeFor[json.Marshaler]()) {
		return nil
	}
	seen[t] = true
	switch t.Kind() {
	case reflect.Pointer, reflect.Slice, reflect.Array, reflect.Map:
		return leftOut(t.Elem(), seen)
	case reflect.Struct:
		for i := range t.NumField() {
			if err := leftOutField(t, t.Field(i), seen); err != nil {
				return err
			}
		}
	}
	return nil
}

func leftOutField(t reflect.Type, f reflect.StructField, seen map[reflect.Type]bool) error {
	kind := f.Type.Kind()
	switch {
	case f.Name == "_" || f.Tag.Get("json") == "-" || f.Type.PkgPath() == "sync" ||
		kind == reflect.Func || kind == reflect.Chan:
		return nil
	case f.IsExported() || f.Anonymous:
		return leftOut(f.Type, seen)
	}
	return fmt.Errorf("%w: JSON leaves out the field %s of %v, whose name begins with a small "+
		"letter: capitalise it, or tag it `json:\"-\"` if a training resumes without it",
		backend.ErrArgument, f.Name, t)
}
