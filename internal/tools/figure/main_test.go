package main

import (
	"bytes"
	"os"
	"path/filepath"
	"reflect"
	"testing"

	"github.com/euryale-ml/euryale/internal/testing/require"
)

// root is the directory of the module.
var root = filepath.Join("..", "..", "..")

func TestCommittedFiguresAreWhatTheCommandDraws(t *testing.T) {
	again := t.TempDir()
	require.NoError(t, run(again, root))
	for _, name := range []string{"allreduce.svg", "packages.md", "training.svg"} {
		got := require.Value(os.ReadFile(filepath.Join(again, name)))(t)
		want := require.Value(os.ReadFile(filepath.Join(root, "docs", name)))(t)
		require.Check(t, bytes.Equal(got, want), "docs/%s is not what bench/results and the "+
			"imports give: run go run ./internal/tools/figure", name)
	}
}

// Arrows follow the imports: those that follow from others are left out, and what has no room, or
// points up, is an error.
func TestArrowsOfTheFigureFollowTheImports(t *testing.T) {
	got, err := arrows(map[string][]string{
		"vm": {"autograd", "backend"}, "autograd": {"backend", "internal/env"}, "backend": nil,
		"internal/env": nil, "internal/tools/soak": {"vm"},
	})
	want := map[int][]int{roomOf("vm"): {roomOf("autograd")},
		roomOf("autograd"): {roomOf("backend")}}
	require.Check(t, err == nil && reflect.DeepEqual(got, want), "the arrows are %v, %v, want %v",
		got, err, want)
	for _, wrong := range []map[string][]string{
		{"surprise": nil}, {"backend": {"vm"}}, {"internal/env": {"backend"}},
	} {
		_, err := arrows(wrong)
		require.Check(t, err != nil, "%v is no error", wrong)
	}
}

func TestWrongResultsAreNotDrawn(t *testing.T) {
	file := filepath.Join(t.TempDir(), "wrong.jsonl")
	require.NoError(t, os.WriteFile(file, []byte(`{"ranks":2,"bytes":1024,"p50_us":1,"wrong":3}`),
		0o600))
	require.Fails(t, "read", require.Err(read(file, 2)), "3 wrong elements")
}
