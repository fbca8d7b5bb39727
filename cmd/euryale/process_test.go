package main

import (
	"bytes"
	"context"
	"encoding/json"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/euryale-ml/euryale/bench"
)

// buildSelf builds this command, for tests that need it as a program.
func buildSelf(t *testing.T) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "euryale")
	if out, err := exec.Command("go", "build", "-o", path, ".").CombinedOutput(); err != nil {
		t.Fatalf("build: %v\n%s", err, out)
	}
	return path
}

func TestBenchAndDoctorStartProcesses(t *testing.T) {
	if testing.Short() {
		t.Skip("builds a program")
	}
	self := buildSelf(t)
	small := []string{"bench", "--min=1K", "--max=4K", "--factor=4", "--iters=5"}

	t.Run("BenchStartsItself", func(t *testing.T) { startsItself(t, self, append(small, "-n", "3", "--json", "--alloc")) })
	t.Run("BenchIsARankUnderALauncher", func(t *testing.T) { underALauncher(t, self, append(small, "--json")) })
	t.Run("BenchOfOneRank", func(t *testing.T) {
		out, err := exec.Command(self, append(small, "-n", "1")...).CombinedOutput()
		if err != nil || !strings.Contains(string(out), "ranks: 1 process;") {
			t.Errorf("%v\n%s", err, out)
		}
	})
	t.Run("DoctorTriesProcesses", func(t *testing.T) {
		out, err := exec.Command(self, "doctor").CombinedOutput()
		if err != nil || !strings.Contains(string(out), "processes       ok  2 ranks all-reduce right") {
			t.Errorf("%v\n%s", err, out)
		}
	})
	t.Run("BenchEndsWithASignal", func(t *testing.T) { endsWithASignal(t, self) })
}

func startsItself(t *testing.T, self string, args []string) {
	var out, notes bytes.Buffer
	cmd := exec.Command(self, args...)
	cmd.Stdout, cmd.Stderr = &out, &notes
	if err := cmd.Run(); err != nil {
		t.Fatalf("%v\n%s", err, notes.String())
	}
	for line := range strings.Lines(out.String()) {
		var r bench.Result
		if err := json.Unmarshal([]byte(line), &r); err != nil {
			t.Fatalf("%v in %q", err, line)
		}
		if r.Ranks != 3 || r.InProc || !r.Alloc || r.Wrong != 0 || r.Iters != 5 {
			t.Errorf("line is %+v", r)
		}
	}
	if n := strings.Count(out.String(), "\n"); n != 2 {
		t.Errorf("%d lines, want 2:\n%s", n, out.String())
	}
	if !strings.HasPrefix(notes.String(), "# euryale bench") {
		t.Errorf("notes are not plain: %q", notes.String())
	}
}

func underALauncher(t *testing.T, self string, args []string) {
	out, err := exec.Command(self, append([]string{"run", "-n", "2", self}, args...)...).Output()
	if err != nil {
		t.Fatal(err)
	}
	if n := strings.Count(string(out), `"ranks":2`); n != 2 || !strings.HasPrefix(string(out), "[0] {") {
		t.Errorf("rank 0 should write 2 lines:\n%s", out)
	}
}

func endsWithASignal(t *testing.T, self string) {
	ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
	defer cancel()
	cmd := exec.CommandContext(ctx, self, "bench", "-n", "2", "--time", "1h")
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	if _, err := out.Read(make([]byte, 1)); err != nil { // the title: ranks are up
		t.Fatal(err)
	}
	began := time.Now()
	if err := cmd.Process.Signal(syscall.SIGTERM); err != nil {
		t.Fatal(err)
	}
	go func() { // what is not read would keep it alive
		for b := make([]byte, 1024); err == nil; {
			_, err = out.Read(b)
		}
	}()
	if err := cmd.Wait(); err == nil || ctx.Err() != nil {
		t.Errorf("it ended with %v after %v", err, time.Since(began))
	}
	if took := time.Since(began); took > 3*time.Second {
		t.Errorf("it took %v to end", took)
	}
}
