//go:build unix

package main

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/euryale-ml/euryale/internal/bench"
	"github.com/euryale-ml/euryale/internal/exit"
)

// standInForOpenMPI puts scripts into PATH whose program measures 3 us, less than any process
// takes.
func standInForOpenMPI(t *testing.T) (path string) {
	t.Helper()
	dir := t.TempDir()
	for name, text := range map[string]string{
		"mpicc": `[ -s "$4" ] && : > "$3"`,
		"mpirun": `case "$*" in *"-n 2"*"tcp,self"*) ` +
			`echo '{"collective":"allreduce","bytes":1024,"p50_us":0.003,"wrong":0}' ;; ` +
			`*) exit 3 ;; esac`,
	} {
		if err := os.WriteFile(filepath.Join(dir, name), []byte("#!/bin/sh\n"+text+"\n"),
			0o700); err != nil {
			t.Fatal(err)
		}
	}
	return dir + ":" + os.Getenv("PATH")
}

func TestAPeerIsMeasuredInTurn(t *testing.T) {
	cmd := command(t, "bench", "-n", "2", "--backend", "tcp", "--peer", "openmpi", "--max", "1K",
		"--time", "1ms", "--rounds", "2", "--json")
	cmd.Env = append(cmd.Env, "PATH="+standInForOpenMPI(t))
	var notes strings.Builder
	cmd.Stderr = &notes
	out, err := cmd.Output()
	if err != nil {
		t.Fatalf("%v\n%s", err, notes.String())
	}
	results, err := bench.ReadJSON(strings.NewReader(string(out)))
	if err != nil || len(results) != 1 {
		t.Fatalf("%v in\n%s", err, out)
	}
	if r := results[0]; r.Peer != "openmpi" || r.PeerMicros != 0.003 || r.Ratio <= 1 ||
		r.Backend != "tcp" {
		t.Errorf("the result is %+v", r)
	}
	if n := strings.Count(notes.String(), "# euryale bench"); n != 2 {
		t.Errorf("%d rounds, want 2:\n%s", n, notes.String())
	}
}

func TestAPeerMeasuresSumsOfF32Only(t *testing.T) {
	for args, want := range map[string]string{
		"--peer mvapich":                                "use one of openmpi, gloo",
		"--peer openmpi --dtype f64":                    "f32",
		"--peer openmpi --collective reduce":            "alltoall, broadcast, from root 0",
		"--peer gloo --collective broadcast --in-place": "by allreduce",
		"--peer openmpi --in-place":                     "the same",
		"--peer gloo":                                   "the same",
		"--peer openmpi --inproc":                       "none of --inproc",
		"--peer openmpi --rounds 0":                     "at least 1",
		"--peer openmpi --iters 3":                      "for a time",
		"--peer openmpi --compress bf16":                "none of --inproc",
	} {
		code, _, err := commandLine(append([]string{"bench", "-n", "2", "--backend", "tcp"},
			strings.Fields(args)...)...)
		if code != exit.Usage || !strings.Contains(err, want) {
			t.Errorf("%s: code %d, the error is %q", args, code, err)
		}
	}
}
