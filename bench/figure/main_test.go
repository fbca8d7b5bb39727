package main

import (
	"bytes"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

func TestCommittedFigureIsOfTheResults(t *testing.T) {
	again := filepath.Join(t.TempDir(), "again.png")
	if err := run(again, filepath.Join("..", "results")); err != nil {
		t.Fatal(err)
	}
	got, err := os.ReadFile(again)
	if err != nil {
		t.Fatal(err)
	}
	want, err := os.ReadFile(filepath.Join("..", "..", "docs", "allreduce.png"))
	if err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(got, want) {
		t.Error("docs/allreduce.png is not what the results give: run go run ./bench/figure")
	}
}

func TestWrongResultsAreNotDrawn(t *testing.T) {
	file := filepath.Join(t.TempDir(), "wrong.jsonl")
	if err := os.WriteFile(file, []byte(`{"ranks":2,"bytes":1024,"p50_us":1,"wrong":3}`), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := read(file, 2); err == nil || !strings.Contains(err.Error(), "3 wrong elements") {
		t.Errorf("the error is %v", err)
	}
}

func TestTicksAreNamed(t *testing.T) {
	var labels []string
	for _, tick := range append(byteTicks(1<<10, 1<<26), timeTicks(1, 1e6)...) {
		if tick.Label != "" {
			labels = append(labels, tick.Label)
		}
	}
	want := "1 KiB,16 KiB,256 KiB,4 MiB,64 MiB,1 us,10 us,100 us,1 ms,10 ms,100 ms,1 s"
	if got := strings.Join(labels, ","); got != want {
		t.Errorf("labels %s, want %s", got, want)
	}
}
