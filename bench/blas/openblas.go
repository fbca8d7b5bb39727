package main

import (
	"bytes"
	"context"
	_ "embed" // the program
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"time"
)

//go:embed openblas_gemm.c
var openBLASProgram []byte

// openBLAS is a program that multiplies matrices by OpenBLAS.
type openBLAS struct{ dir, program string }

// buildOpenBLAS compiles the program. Close removes it.
func buildOpenBLAS(ctx context.Context) (*openBLAS, error) {
	dir, err := os.MkdirTemp("", "euryale-openblas-")
	if err != nil {
		return nil, err
	}
	o := &openBLAS{dir, filepath.Join(dir, "openblas_gemm")}
	source := o.program + ".c"
	if err := os.WriteFile(source, openBLASProgram, 0o600); err != nil {
		return nil, errors.Join(err, o.Close())
	}
	if said, err := exec.CommandContext(ctx, "cc", "-O2", "-o", o.program, source, "-lopenblas").
		CombinedOutput(); err != nil {
		return nil, errors.Join(fmt.Errorf("cc -lopenblas: %w: install a C compiler and OpenBLAS "+
			"(Debian: apt-get install gcc libopenblas-dev)\n%s", err, said), o.Close())
	}
	return o, nil
}

// Gemm returns the microseconds of a product: the median of calls that take about so long together.
// form says of each operand whether it is transposed, as in "nt".
func (o *openBLAS) Gemm(ctx context.Context, threads int, dtype, form string, m, n, k int,
	budget time.Duration) (float64, error) {
	cmd := exec.CommandContext(ctx, o.program, dtype, form, fmt.Sprint(m), fmt.Sprint(n),
		fmt.Sprint(k), fmt.Sprint(budget.Seconds()))
	cmd.Env = append(os.Environ(), fmt.Sprintf("OPENBLAS_NUM_THREADS=%d", threads))
	var said bytes.Buffer
	cmd.Stderr = &said
	out, err := cmd.Output()
	if err != nil {
		return 0, fmt.Errorf("%s: %w\n%s", cmd, err, said.Bytes())
	}
	micros, err := strconv.ParseFloat(strings.TrimSpace(string(out)), 64)
	if err != nil {
		return 0, fmt.Errorf("%s: %w", cmd, err)
	}
	return micros, nil
}

// Close removes the program.
func (o *openBLAS) Close() error { return os.RemoveAll(o.dir) }
