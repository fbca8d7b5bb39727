package main

import (
	"bytes"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

func TestCommittedFigureIsOfTheResults(t *testing.T) {
	again := filepath.Join(t.TempDir(), "again.svg")
	if err := run(again, filepath.Join("..", "..", "..", "bench", "results")); err != nil {
		t.Fatal(err)
	}
	got, err := os.ReadFile(again)
	if err != nil {
		t.Fatal(err)
	}
	want, err := os.ReadFile(filepath.Join("..", "..", "..", "docs", "allreduce.svg"))
	if err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(got, want) {
		t.Error("docs/allreduce.svg is not what the results give: run go run " +
			"./internal/tools/figure")
	}
}

func TestWrongResultsAreNotDrawn(t *testing.T) {
	file := filepath.Join(t.TempDir(), "wrong.jsonl")
	if err := os.WriteFile(file, []byte(`{"ranks":2,"bytes":1024,"p50_us":1,"wrong":3}`),
		0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := read(file, 2); err == nil || !strings.Contains(err.Error(), "3 wrong elements") {
		t.Errorf("the error is %v", err)
	}
}
