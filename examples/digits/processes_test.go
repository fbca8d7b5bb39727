package main

import (
	"bytes"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/euryale-ml/euryale/rendezvous/launch"
)

// program builds the example as users run it.
func program(t *testing.T) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "digits")
	if out, err := exec.Command("go", "build", "-o", path, ".").CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	return path
}

// learned checks the last line of rank 0.
func learned(t *testing.T, printed, ranks string) {
	t.Helper()
	lines := strings.Split(strings.TrimSpace(printed), "\n")
	last := lines[len(lines)-1]
	if !strings.Contains(last, "accuracy=0.9") || !strings.Contains(last, "ranks="+ranks+" backend=host") {
		t.Errorf("the last line is %q", last)
	}
}

func TestFourProcessesLearn(t *testing.T) {
	var out, errs bytes.Buffer
	job := launch.Job{Program: program(t), Args: []string{"--epochs", "10"}, Ranks: 4, Stdout: &out, Stderr: &errs}
	if err := launch.Run(t.Context(), job); err != nil {
		t.Fatalf("%v: %s", err, errs.String())
	}
	learned(t, out.String(), "4")
}

func TestFourProcessesOfMpirunLearn(t *testing.T) {
	if _, err := exec.LookPath("mpirun"); err != nil {
		t.Skip("needs mpirun (Debian: openmpi-bin)")
	}
	cmd := exec.Command("mpirun", "--oversubscribe", "-n", "4", program(t), "--epochs", "10")
	cmd.Env = append(os.Environ(), "OMPI_ALLOW_RUN_AS_ROOT=1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1")
	out, err := cmd.Output()
	if err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	learned(t, string(out), "4")
}
