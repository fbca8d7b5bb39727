// Package peers measures collectives of other libraries as euryale bench measures its own, for
// a comparison in one run. README.md says what each needs.
package peers

import (
	"bytes"
	"context"
	"embed"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"

	"github.com/euryale-ml/euryale/internal/bench"
)

//go:embed openmpi.c
var openMPI []byte

//go:embed gloo_allreduce.py ranks.py
var gloo embed.FS

// Kinds are the collectives that a peer's program runs, nil if there is no such peer.
func Kinds(name string) []string {
	return map[string][]string{
		"openmpi": {"allreduce", "reducescatter", "allgather", "alltoall", "broadcast"},
		"gloo":    {"allreduce"},
	}[name]
}

// Program is a peer's program, ready to run.
type Program struct {
	dir  string
	args []string
}

// Prepare writes the program of a peer into a directory of its own, and builds it where it must be
// built. It measures a collective of f32 among ranks of this machine by the sizes and the time of
// c; with sockets, Open MPI uses TCP instead of shared memory, as Gloo does anyway. Gloo adds up in
// place, and Open MPI between two buffers. Close removes the program.
func Prepare(ctx context.Context, name, collective string, ranks int, c bench.Config,
	sockets bool) (*Program, error) {
	dir, err := os.MkdirTemp("", "euryale-peer-")
	if err != nil {
		return nil, err
	}
	p := &Program{dir: dir}
	if name == "gloo" {
		err = p.gloo(ranks, c)
	} else {
		err = p.openMPI(ctx, collective, ranks, c, sockets)
	}
	if err != nil {
		return nil, fmt.Errorf("peer %s: %w", name, errors.Join(err, p.Close()))
	}
	return p, nil
}

func (p *Program) gloo(ranks int, c bench.Config) error {
	script := filepath.Join(p.dir, "gloo_allreduce.py")
	p.args = []string{
		"python3", script, "-n", fmt.Sprint(ranks), "--min", fmt.Sprint(int(c.Min)), "--max",
		fmt.Sprint(int(c.Max)),
		"--factor", fmt.Sprint(c.Factor), "--time", fmt.Sprint(c.Budget.Seconds()),
	}
	return os.CopyFS(p.dir, gloo)
}

func (p *Program) openMPI(ctx context.Context, collective string, ranks int, c bench.Config,
	sockets bool) error {
	source, program := filepath.Join(p.dir, "openmpi.c"), filepath.Join(p.dir, "openmpi")
	if err := os.WriteFile(source, openMPI, 0o600); err != nil {
		return err
	}
	if said, err := exec.CommandContext(ctx, "mpicc", "-O2", "-o", program, source).
		CombinedOutput(); err != nil {
		return fmt.Errorf("mpicc: %w\n%s", err, said)
	}
	p.args = []string{"mpirun", "-n", fmt.Sprint(ranks)}
	if os.Geteuid() == 0 {
		p.args = append(p.args, "--allow-run-as-root")
	}
	if ranks > runtime.NumCPU() { // which mpirun refuses, and then lets ranks that wait yield
		p.args = append(p.args, "--oversubscribe")
	}
	if sockets {
		p.args = append(p.args, "--mca", "pml", "ob1", "--mca", "btl", "tcp,self")
	}
	p.args = append(p.args, program, fmt.Sprint(int(c.Min)), fmt.Sprint(int(c.Max)),
		fmt.Sprint(c.Factor), fmt.Sprint(c.Budget.Seconds()), collective)
	return nil
}

// Run measures once.
func (p *Program) Run(ctx context.Context) ([]bench.Result, error) {
	cmd := exec.CommandContext(ctx, p.args[0], p.args[1:]...)
	var said bytes.Buffer
	cmd.Stderr = &said
	out, err := cmd.Output()
	if err != nil {
		return nil, fmt.Errorf("%s: %w\n%s", strings.Join(p.args, " "), err, said.Bytes())
	}
	return bench.ReadJSON(bytes.NewReader(out))
}

// Close removes the program.
func (p *Program) Close() error { return os.RemoveAll(p.dir) }
