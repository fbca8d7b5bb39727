// Command compare prints, size by size, how two benchmarks compare:
//
//	go run ./bench/peers/compare gloo-4.jsonl host-4.jsonl
//
// Files hold lines as `euryale bench --json` writes them. The time of a call is
// stream_us where both have it, as on GPUs, and p50_us otherwise; a speedup above
// 1 means that the second is faster. Lines are matched by collective, dtype,
// ranks and bytes; the last line of each counts. It fails if a line of the
// first has no match in the second, or has wrong elements.
package main

import (
	"bufio"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"slices"
	"strings"
)

func main() {
	if err := run(os.Stdout, os.Args[1:]); err != nil {
		fmt.Fprintln(os.Stderr, "compare:", err)
		os.Exit(1)
	}
}

func run(w io.Writer, files []string) error {
	if len(files) != 2 {
		return errors.New("usage: compare BASELINE.jsonl NEW.jsonl")
	}
	before, order, err := load(files[0])
	if err != nil {
		return err
	}
	after, _, err := load(files[1])
	if err != nil {
		return err
	}
	return table(w, order, before, after)
}

// key is what two lines must share to be compared.
type key struct {
	Collective string `json:"collective"`
	DType      string `json:"dtype"`
	Ranks      int    `json:"ranks"`
	Bytes      int    `json:"bytes"`
}

// line is what is compared.
type line struct {
	key
	Backend string  `json:"backend"`
	P50     float64 `json:"p50_us"`
	Stream  float64 `json:"stream_us"`
	P99     float64 `json:"p99_us"`
	AlgBW   float64 `json:"algbw_gbps"`
	Wrong   int     `json:"wrong"`
}

// load reads a file of JSON lines; other lines that begin with # are comments.
func load(path string) (lines map[key]line, order []key, err error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, nil, err
	}
	defer f.Close()
	lines = map[key]line{}
	in := bufio.NewScanner(f)
	for number := 1; in.Scan(); number++ {
		text := strings.TrimSpace(in.Text())
		if text == "" || text[0] == '#' {
			continue
		}
		var l line
		if err := json.Unmarshal([]byte(text), &l); err != nil {
			return nil, nil, fmt.Errorf("%s:%d: %w", path, number, err)
		}
		if l.P50 <= 0 {
			return nil, nil, fmt.Errorf("%s:%d: no p50_us", path, number)
		}
		if !slices.Contains(order, l.key) {
			order = append(order, l.key)
		}
		lines[l.key] = l
	}
	return lines, order, in.Err()
}

func table(w io.Writer, order []key, before, after map[key]line) error {
	fmt.Fprintf(w, "%-14s %5s %5s %10s  %-12s %11s  %-12s %11s %8s %8s %8s\n",
		"collective", "dtype", "ranks", "bytes", "baseline", "us", "new", "us", "time", "p99",
		"algbw")
	var problems []error
	for _, k := range order {
		a, b := before[k], after[k]
		if b.P50 == 0 {
			problems = append(problems, fmt.Errorf("%+v has no match in the second file", k))
			continue
		}
		if a.Wrong+b.Wrong > 0 {
			problems = append(problems, fmt.Errorf("%+v has wrong elements: %d and %d", k, a.Wrong,
				b.Wrong))
		}
		before, after := a.P50, b.P50
		if a.Stream > 0 && b.Stream > 0 {
			before, after = a.Stream, b.Stream
		}
		p99 := "-" // torch's lines have none
		if a.P99 > 0 && b.P99 > 0 {
			p99 = fmt.Sprintf("%.2fx", a.P99/b.P99)
		}
		fmt.Fprintf(w, "%-14s %5s %5d %10d  %-12s %11.2f  %-12s %11.2f %7.2fx %8s %7.2fx\n",
			k.Collective, k.DType, k.Ranks, k.Bytes, a.Backend, before, b.Backend, after,
			before/after, p99, b.AlgBW/a.AlgBW)
	}
	return errors.Join(problems...)
}
