package main

import (
	"bytes"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

func write(t *testing.T, text string) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "lines.jsonl")
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}

const slow = `# a comment
` + `{"collective":"allreduce","backend":"gloo","ranks":4,"dtype":"f32","bytes":1024,` +
	`"p50_us":90,"p99_us":200,"algbw_gbps":1,"wrong":0}
`

func TestSpeedupIsOldByNew(t *testing.T) {
	fast := strings.NewReplacer("gloo", "host", "90", "30", "200", "100", ":1,", ":3,").
		Replace(slow)
	var out bytes.Buffer
	if err := run(&out, []string{write(t, slow), write(t, fast)}); err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{"gloo", "host", "3.00x", "2.00x", "1024"} {
		if !strings.Contains(out.String(), want) {
			t.Errorf("no %q in\n%s", want, out.String())
		}
	}
}

func TestStreamsAreComparedWhereBothHaveThem(t *testing.T) {
	a := strings.Replace(slow, `"p50_us":90,"p99_us":200`, `"p50_us":90,"stream_us":20`, 1)
	b := strings.Replace(slow, `"p50_us":90`, `"p50_us":10,"stream_us":5`, 1)
	var out bytes.Buffer
	if err := run(&out, []string{write(t, a), write(t, b)}); err != nil {
		t.Fatal(err)
	}
	if !strings.Contains(out.String(), "4.00x") || !strings.Contains(out.String(), " - ") {
		t.Errorf("got\n%s", out.String())
	}
}

func TestProblemsAreReported(t *testing.T) {
	for want, second := range map[string]string{
		"no match":       strings.Replace(slow, "1024", "2048", 1),
		"wrong elements": strings.Replace(slow, `"wrong":0`, `"wrong":3`, 1),
		"no p50_us":      `{"collective":"allreduce"}`,
		":1: ":           "not JSON",
	} {
		err := run(&bytes.Buffer{}, []string{write(t, slow), write(t, second)})
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("error is %v, want one with %q", err, want)
		}
	}
	if err := run(&bytes.Buffer{}, nil); err == nil || !strings.Contains(err.Error(), "usage") {
		t.Errorf("error is %v", err)
	}
}
