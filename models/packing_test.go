package models_test

import (
	"errors"
	"math"
	"slices"
	"sync"
	"testing"

	"gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/euryale-ml/euryale/autograd"
	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/testing/require"
	"github.com/euryale-ml/euryale/layers"
	"github.com/euryale-ml/euryale/models"
	"github.com/euryale-ml/euryale/vm"
)

// lossOf returns the mean loss of rows of a context, and the square of the gradient's norm if one
// rank has it all. positions are of documents, nil if each row is one.
func lossOf(t *testing.T, dir string, s layers.Sizes, context int, ids, targets,
	positions []int) (loss, square float64) {
	t.Helper()
	rows := len(ids) / context
	within(t, s, func(l *layers.Layout, build sync.Locker) error {
		build.Lock()
		defer build.Unlock()
		m := require.Value(models.Load(dir))(t)
		defer m.Close()
		b := layers.NewBuilder(gorgonia.NewGraph(), l, tensor.Float32, 1)
		tokens := b.Tokens("tokens", 1, rows, context)
		next := b.Tokens("targets", 1, rows, context).Padding(-1)
		var places []*layers.Tokens
		if positions != nil {
			places = append(places, b.Tokens("positions", 1, rows, context))
		}
		logits, err := m.Logits(b, tokens, places...)
		cost := b.CrossEntropy(logits, next)
		learnables, wrong := b.Grad(cost)
		if err = errors.Join(err, wrong, tokens.Set(ids), next.Set(targets)); err != nil {
			return err
		}
		for _, p := range places {
			err = p.Set(positions)
		}
		machine, wrong := vm.New(b.Graph(), nil, vm.Keep(cost.Node))
		if err = errors.Join(err, wrong); err != nil {
			return err
		}
		build.Unlock()
		err = machine.RunAll()
		share := float64(cost.Value().Data().(float32))
		err = errors.Join(err, autograd.Sum(l.Data, &share))
		build.Lock()
		if loss = share; s.SP*s.TP == 1 {
			for _, n := range learnables {
				for _, g := range n.Deriv().Value().Data().([]float32) {
					square += float64(g) * float64(g)
				}
			}
		}
		return errors.Join(err, machine.Close())
	})
	return loss, square
}

// TestDocumentsOfASampleDoNotSeeEachOther: packed documents have the loss and the gradient that
// they have in samples of their own, in each layout, with windows and dropout, too.
func TestDocumentsOfASampleDoNotSeeEachOther(t *testing.T) {
	const context = 10
	lengths := []int{4, 5, 1, 9, 1, 3, 7} // fill rows of the context
	var ids, targets, positions, alone, aims []int
	for i, n := range lengths {
		for at := range context {
			id, target := 0, -1
			if at < n {
				id, target = (7*i+3*at)%61, (5*i+11*at+1)%61
				ids, targets, positions = append(ids, id), append(targets, target),
					append(positions, at)
			}
			alone, aims = append(alone, id), append(aims, target)
		}
	}
	for _, folder := range folders {
		dir := copied(t, folder)
		if folder == "mistral" {
			configured("sliding_window", 3)(t, dir)
		}
		one := layouts[0]
		want, wantSquare := lossOf(t, dir, one, context, alone, aims, nil)
		for _, s := range layouts {
			if s.DP > 1 { // has other rows
				continue
			}
			got, square := lossOf(t, dir, s, context, ids, targets, positions)
			require.Check(t, math.Abs(got-want) < 1e-5 && (s != one ||
				math.Abs(square/wantSquare-1) < 1e-4), "%s on %v: the loss is %v, alone %v; "+
				"gradients %v and %v", folder, s, got, want, square, wantSquare)
		}
		crossed, _ := lossOf(t, dir, one, context, ids, targets, nil)
		require.Check(t, math.Abs(crossed-want) > 1e-3, "%s: the loss is %v where documents see "+
			"each other, alone %v", folder, crossed, want)
	}
	dir := copied(t, "gpt2")
	configured("attn_pdrop", 1e-6)(t, dir) // which has another graph, and drops nothing
	want, _ := lossOf(t, dir, layouts[0], context, alone, aims, nil)
	got, _ := lossOf(t, dir, layouts[0], context, ids, targets, positions)
	require.Check(t, math.Abs(got-want) < 1e-4, "with dropout the loss is %v, alone %v", got, want)
}

// TestPositionsThatAnglesFollowFromAreRefused: where the angles depend on how long a text is.
func TestPositionsThatAnglesFollowFromAreRefused(t *testing.T) {
	dir := copied(t, "llama3")
	configured("rope_parameters", nil)(t, dir)
	configured("rope_scaling", map[string]any{"type": "dynamic", "factor": 2})(t, dir)
	within(t, layers.Sizes{DP: 1, SP: 1, TP: 1}, func(l *layers.Layout, _ sync.Locker) error {
		m := require.Value(models.Load(dir))(t)
		defer m.Close()
		for context, refused := range map[int]bool{80: false, 81: true} {
			b := layers.NewBuilder(gorgonia.NewGraph(), l, tensor.Float32, 1)
			both := slices.Repeat([]*layers.Tokens{b.Tokens("positions", 1, 1, context)}, 2)
			tokens := b.Tokens("tokens", 1, 1, context)
			_, err := m.Logits(b, tokens, both[0])
			require.Check(t, errors.Is(err, backend.ErrUnsupported) == refused &&
				(err != nil) == refused, "%d positions: %v", context, err)
			_, err = m.Logits(b, tokens, both...)
			require.Fails(t, "two positions", err, backend.ErrArgument, "give one, or none")
		}
		return nil
	})
}
