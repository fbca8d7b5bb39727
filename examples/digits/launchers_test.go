package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/euryale-ml/euryale/internal/testing/exampletest"
	"github.com/euryale-ml/euryale/internal/testing/require"
)

// learned looks for the last line of rank 0, which other ranks may have written behind.
func learned(t *testing.T, said string) {
	t.Helper()
	if !regexp.MustCompile(`(?m)accuracy=0\.9\d+ ranks=4 backend=host params=`).MatchString(said) {
		t.Errorf("four ranks have not learned:\n%s", said)
	}
}

// TestFoundFourProcessesOfMPILaunchersLearn: Debian has them in openmpi-bin and mpich.
func TestFoundFourProcessesOfMPILaunchersLearn(t *testing.T) {
	for _, launcher := range []string{"mpirun.openmpi --oversubscribe", "mpiexec.hydra"} {
		t.Run(launcher, func(t *testing.T) {
			args := strings.Fields(launcher)
			if _, err := exec.LookPath(args[0]); err != nil {
				t.Skip(err)
			}
			cmd := exec.Command(args[0], append(args[1:], "-n", "4", exampletest.Program(t),
				"--epochs", "10")...)
			cmd.Env = append(os.Environ(), "OMPI_ALLOW_RUN_AS_ROOT=1",
				"OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1")
			out, err := cmd.CombinedOutput()
			require.That(t, err == nil, "%v: %s", err, out)
			learned(t, string(out))
		})
	}
}

// Each agent of torchrun is a node for PyTorch, and holds MASTER_PORT.
func TestFoundTwoAgentsOfTorchrunOnOneMachineLearn(t *testing.T) {
	if testing.Short() {
		t.Skip("PyTorch takes seconds to start")
	}
	if out, err := exec.Command("python3", "-c", "import torch").CombinedOutput(); err != nil {
		t.Skipf("needs PyTorch (pip install torch): %s", bytes.TrimSpace(out))
	}
	digits := exampletest.Program(t)
	for name, c := range map[string]struct {
		args  string // with the port
		token string
	}{
		"static": {"--master-addr=127.0.0.1 --master-port=%d", ""},
		"c10d with a token": {"--rdzv-backend=c10d --rdzv-id=job --rdzv-endpoint=localhost:%d",
			"a token of more than 16 bytes"},
	} {
		t.Run(name, func(t *testing.T) {
			if c.token == "" && os.Getenv("EURYALE_FULL") != "1" {
				t.Skip("one way is enough for a sample: PyTorch takes seconds to start")
			}
			ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
			defer cancel()
			args := strings.Fields(fmt.Sprintf(c.args, freePort(t)))
			agents := make([]*exec.Cmd, 2)
			outs := make([]bytes.Buffer, len(agents))
			for n := range agents {
				all := append([]string{"-m", "torch.distributed.run", "--nnodes=2",
					"--nproc-per-node=2", fmt.Sprint("--node-rank=", n)}, args...)
				agents[n] = exec.CommandContext(ctx, "python3", append(all, "--no-python", digits,
					"--epochs", "10")...)
				agents[n].Env = append(os.Environ(), "EURYALE_TOKEN="+c.token)
				agents[n].Stdout, agents[n].Stderr = &outs[n], &outs[n]
				require.NoError(t, agents[n].Start())
			}
			var errs []error
			for _, a := range agents {
				errs = append(errs, a.Wait())
			}
			both := outs[0].String() + outs[1].String()
			err := errors.Join(errs...)
			require.That(t, err == nil, "%v: %s", err, both)
			learned(t, both)
		})
	}
}

func freePort(t *testing.T) int {
	t.Helper()
	ln := require.Value(net.Listen("tcp", "127.0.0.1:0"))(t)
	defer ln.Close()
	return ln.Addr().(*net.TCPAddr).Port
}

// A rank whose variables were set by hand says who is missing, or what is.
func TestFoundVariablesSetByHandAreExplained(t *testing.T) {
	digits := exampletest.Program(t)
	for name, c := range map[string]struct {
		vars []string
		code int
		want []string
	}{
		"the other rank is missing": {[]string{"PMI_RANK=0", "PMI_SIZE=2", "EURYALE_TIMEOUT=1s"}, 1,
			[]string{"rank 1 did not join", "timeout after 1s"}},
		"no job": {[]string{"RANK=0", "WORLD_SIZE=2"}, 2,
			[]string{"RANK=0", "MASTER_PORT", "EURYALE_JOB"}},
		"signs of a job": {[]string{"FLUX_TASK_RANK=1"}, 2,
			[]string{"FLUX_TASK_RANK", "EURYALE_ALONE=1"}},
	} {
		t.Run(name, func(t *testing.T) {
			cmd := exec.Command(digits)
			cmd.Env = append(os.Environ(), c.vars...)
			out, err := cmd.CombinedOutput()
			require.Check(t, cmd.ProcessState.ExitCode() == c.code, "%v, want exit code %d", err,
				c.code)
			for _, part := range c.want {
				require.Check(t, strings.Contains(string(out), part), "%q lacks %q", out, part)
			}
		})
	}
}
