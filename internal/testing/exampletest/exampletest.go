// Package exampletest runs an example, or another program that trains, on ranks that are processes,
// all of them its test binary:
//
//	func TestMain(m *testing.M) { exampletest.Main(m, main) }
//
//	printed := exampletest.Train(t, 2, "--epochs 3")
package exampletest

import (
	"bytes"
	"fmt"
	"os"
	"regexp"
	"strings"
	"testing"

	"github.com/euryale-ml/euryale/internal/launch"
	"github.com/euryale-ml/euryale/internal/testing/proctest"
	"github.com/euryale-ml/euryale/internal/testing/require"
)

// variable makes a test binary the example.
const variable = "RUN_AS_EXAMPLE"

// Main is the TestMain of a package: it runs the tests, or the example in a process of a job.
func Main(m *testing.M, example func()) {
	if os.Getenv(variable) != "" {
		example()
		return
	}
	os.Exit(m.Run())
}

// Program returns the test binary, which is the example in the processes that the test starts.
func Program(t *testing.T) string {
	t.Helper()
	self := require.Value(os.Executable())(t)
	t.Setenv(variable, "1")
	return self
}

// Job is the example on ranks.
type Job struct {
	launch.Job
	Out  proctest.Notice
	Errs bytes.Buffer
}

// New returns a job, which [Job.Run] starts, with variables besides those of the test.
func New(t *testing.T, ranks int, flags string, environ ...string) *Job {
	t.Helper()
	j := &Job{}
	j.Job = launch.Job{Program: Program(t), Ranks: ranks, Args: strings.Fields(flags),
		Stdout: &j.Out, Stderr: &j.Errs, Env: append(os.Environ(), environ...)}
	return j
}

// Run runs the job, which must not fail, and returns what it prints.
func (j *Job) Run(t *testing.T) string {
	t.Helper()
	err := launch.Run(t.Context(), j.Job)
	require.That(t, err == nil, "%d ranks %q: %v\n%s%s", j.Ranks, j.Args, err, &j.Out, &j.Errs)
	return j.Out.String()
}

// Refused runs the job, which must fail and write some words on standard error, and returns its
// error.
func (j *Job) Refused(t *testing.T, want string) error {
	t.Helper()
	err := launch.Run(t.Context(), j.Job)
	require.Check(t, err != nil && strings.Contains(j.Errs.String(), want),
		"%q: %v, want %q in\n%s", j.Args, err, want, &j.Errs)
	return err
}

// Train trains on ranks, and returns what they print.
func Train(t *testing.T, ranks int, flags string) string {
	t.Helper()
	return New(t, ranks, flags).Run(t)
}

// Ending returns the groups of the line that a training ends with.
func Ending(t *testing.T, last *regexp.Regexp, printed string) []string {
	t.Helper()
	end := last.FindStringSubmatch(printed)
	require.That(t, end != nil, "the last line does not match %v in\n%s", last, printed)
	return end
}

// Numbers reads numbers.
func Numbers(t *testing.T, texts ...string) []float64 {
	t.Helper()
	x := make([]float64, len(texts))
	for i, text := range texts {
		require.NoError(t, require.Err(fmt.Sscan(text, &x[i])))
	}
	return x
}

// HasCurve checks that a training has drawn its curve.
func HasCurve(t *testing.T, file string) {
	t.Helper()
	svg, err := os.ReadFile(file)
	require.Check(t,
		err == nil && bytes.Contains(svg, []byte("<svg")) && bytes.Contains(svg, []byte("</svg>")),
		"the curve: %v, of %d bytes", err, len(svg))
}
