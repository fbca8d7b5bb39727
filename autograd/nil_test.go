package autograd

import (
	"context"
	"errors"
	"io/fs"
	"path/filepath"
	"testing"
	"time"

	"gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/euryale-ml/euryale/autograd/solver"
	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/testing/nilargs"
	"github.com/euryale-ml/euryale/internal/testing/reference"
	"github.com/euryale-ml/euryale/internal/testing/require"
)

// noJob is a Job of which nobody becomes a member.
type noJob struct{ generations }

// noSteps are Steps that nobody takes.
type noSteps struct{ Steps }

type generations = Job

func TestNilArgumentsAreErrors(t *testing.T) {
	comm := reference.New("test", 1, time.Minute)[0]
	w := gorgonia.NewVector(gorgonia.NewGraph(), tensor.Float64, gorgonia.WithShape(2),
		gorgonia.WithName("w"), gorgonia.WithInit(gorgonia.Ones()))
	with := func(options ...Option) error {
		d, err := New(comm, gorgonia.Nodes{w}, options...)
		if err == nil {
			err = d.Close()
		}
		return err
	}
	rows := tensor.New(tensor.WithShape(2, 2), tensor.Of(tensor.Float64))
	one, file := 1.0, filepath.Join(t.TempDir(), "w.safetensors")
	require.NoError(t, SaveWeights(file, gorgonia.Nodes{w}))
	compress := func(c backend.Communicator) (backend.Communicator, error) { return c, nil }
	none := func(string) (fs.FS, error) { return nil, fs.ErrNotExist }
	nilargs.Check(t, map[string]nilargs.Use{
		"Agree":        {F: Agree, Args: []any{comm, "all", errors.New("a problem")}},
		"Any":          {F: Any, Args: []any{comm, true}},
		"Stopped":      {F: Stopped, Args: []any{context.Background(), comm}},
		"Evaluation":   {F: Evaluation, Args: []any{comm, 4, 2}},
		"Mean":         {F: Mean, Args: []any{comm, &one}},
		"LoadWeights":  {F: LoadWeights, Args: []any{file, gorgonia.Nodes{w}, NonStrict(nil)}},
		"ReadProgress": {F: ReadProgress, Args: []any{file, new(int), none}},
		"ReadWeights":  {F: ReadWeights, Args: []any{file, none}},
		"SaveWeights":  {F: SaveWeights, Args: []any{file, gorgonia.Nodes{w}, none}},
		"FromStore": {F: func(open func(string) (fs.FS, error)) error {
			return LoadWeights(file, gorgonia.Nodes{w}, FromStore(open))
		}, Args: []any{none}},
		"WithStore": {F: func(open func(string) (fs.FS, error)) error {
			return with(WithStore(open))
		}, Args: []any{none}},
		"NewElastic": {F: NewElastic, Args: []any{t.Context(), noJob{}, &solver.SGD{Rate: 1}, 2,
			noSteps{}}},
		"New":            {F: New, Args: []any{comm, gorgonia.Nodes{w}, WithSum()}},
		"NewSampler":     {F: NewSampler, Args: []any{comm, 4, 2, uint64(1)}},
		"NewTreeSampler": {F: NewTreeSampler, Args: []any{comm, 4, 2, 2, uint64(1)}},
		"Rows":           {F: Rows, Args: []any{rows, rows, []int{0}}},
		"Sum":            {F: Sum, Args: []any{comm, &one}},
		"TreeMean":       {F: TreeMean, Args: []any{comm, []float64{1}}},
		"Gather":         {F: Gather, Args: []any{comm, 1.}},
		"WithCompression": {F: func(c func(backend.Communicator) (backend.Communicator,
			error)) error {
			return with(WithCompression(c))
		}, Args: []any{compress}},
		"WithParts": {F: func(c backend.Communicator, _ map[string]int) error {
			return with(WithParts(c, nil))
		}, Args: []any{comm, map[string]int{}}},
		"WithRandom": {F: func(r Random) error { return with(WithRandom(r)) }, Args: []any{nil}},
		"WithApart": {F: func(params ...*gorgonia.Node) error {
			return with(WithApart(params...))
		}, Args: []any{w}},
		"WithEarly": {F: func(params ...*gorgonia.Node) error {
			return with(WithEarly(params...))
		}, Args: []any{w}},
		"WithFrozen": {F: func(variables ...*gorgonia.Node) error {
			return with(WithFrozen(variables...))
		}, Args: []any{w}},
		"WithTables": {F: func(tables ...Table) error { return with(WithTables(tables...)) },
			Args: []any{nil}},
		"WithNotice": {F: func(say func(string)) error { return with(WithNotice(say)) },
			Args: []any{func(string) {}}},
	}, map[string]string{
		"Agree.problem": "nil is no problem",
		"Hooked":        "it returns false",
		"NonStrict":     "nil reports nothing",
	})
	require.Check(t, !Hooked(nil), "a nil node has a hook")
}
