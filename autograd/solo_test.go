package autograd

import (
	"errors"
	"path/filepath"
	"slices"
	"testing"

	"github.com/euryale-ml/euryale/autograd/solver"
	"github.com/euryale-ml/euryale/internal/testing/require"
)

// TestATrainingAloneSavesAndLoads: a program without ranks has checkpoints, too.
func TestATrainingAloneSavesAndLoads(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "checkpoint")
	model := []shaped{{"a", 1, []int{2}}, {"b", 10, []int{3}}}
	p, s := nodes(model...), &solver.Adam{Rate: 0.5}
	d, err := New(Solo(), p)
	require.NoError(t, err)
	err = errors.Join(stepped(s, p, 1, 2), d.Save(dir, s, nil), stepped(s, p, 3), d.Close())
	got, resumed := nodes(model...), &solver.Adam{Rate: 0.5}
	d, err2 := New(Solo(), got)
	if err = errors.Join(err, err2); err != nil {
		t.Fatal(err)
	}
	err = errors.Join(d.Load(dir, resumed, nil), stepped(resumed, got, 3), d.Check(), d.Close())
	require.NoError(t, err)
	for i, n := range got {
		if x, want := numbers(n.Value()), numbers(p[i].Value()); !slices.Equal(x, want) {
			t.Errorf("%s is %v, want %v", n.Name(), x, want)
		}
	}
}
