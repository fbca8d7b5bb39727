// Command mutate breaks lines of the module, one at a time, and says which test notices:
//
//	go run ./internal/tools/mutate [-full] [-race] [host gpu group sparse rendezvous nonfinite]
//
// The lines are listed in mutations.go. The files stay as they are: the go command is told to
// compile others in their place. Each mutation runs the tests of its packages as `make test`
// does, with -full as `make test-full` and with -race as `make race`. The exit status is 1 if a
// mutation is not noticed, or if its line is gone; then list another one like it.
package main

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"time"
)

// mutation is a line of a file and what stands there instead.
type mutation struct {
	area, file string
	old, new   string
	packages   []string // whose tests should notice; nil means the file's own
}

func main() {
	full, race := flag.Bool("full", false, "run the full product of cases"),
		flag.Bool("race", false, "run under the race detector, with -short")
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	defer stop()
	if err := run(ctx, *full, *race, flag.Args()); err != nil {
		fmt.Fprintln(os.Stderr, "mutate:", err)
		os.Exit(1)
	}
}

func run(ctx context.Context, full, race bool, areas []string) error {
	dir, err := os.MkdirTemp("", "euryale-mutate-")
	if err != nil {
		return err
	}
	defer os.RemoveAll(dir)
	args := []string{"test", "-vet=off", "-failfast", "-timeout=5m"}
	if race {
		args = append(args, "-race", "-short")
	}
	env := os.Environ()
	if full {
		env = append(env, "EURYALE_FULL=1")
	}
	var problems, tried int
	for _, m := range mutations {
		if len(areas) > 0 && !slices.Contains(areas, m.area) {
			continue
		}
		began := time.Now()
		verdict, ok := m.try(ctx, dir, args, env)
		if ctx.Err() != nil {
			return ctx.Err()
		}
		fmt.Printf("%-10s %-28s %s -> %s\n           %s, %.0f s\n", m.area, filepath.Base(m.file),
			m.old, cmp.Or(m.new, "(nothing)"), verdict, time.Since(began).Seconds())
		tried++
		if !ok {
			problems++
		}
	}
	fmt.Printf("noticed=%d of %d\n", tried-problems, tried)
	if problems > 0 {
		return fmt.Errorf("%d mutations were not noticed", problems)
	}
	return nil
}

// try says what came of one mutation.
func (m mutation) try(ctx context.Context, dir string, args, env []string) (verdict string,
	ok bool) {
	overlay, err := m.overlay(dir)
	if err != nil {
		return err.Error(), false
	}
	args = append(slices.Clone(args), "-overlay="+overlay)
	if m.packages == nil {
		args = append(args, "./"+filepath.Dir(m.file))
	}
	cmd := exec.CommandContext(ctx, "go", append(args, m.packages...)...)
	cmd.Env = env
	out, err := cmd.CombinedOutput()
	return judge(out, err)
}

var failed = regexp.MustCompile(`(?m)^\s*--- FAIL: (\S+)`)

// judge reads what the tests of a mutation wrote.
func judge(out []byte, err error) (verdict string, ok bool) {
	names := failed.FindAllSubmatch(out, -1)
	switch {
	case err == nil:
		return "NOT NOTICED", false
	case bytes.Contains(out, []byte("[build failed]")) ||
		bytes.Contains(out, []byte("[setup failed]")):
		return "does not compile: " + strings.TrimSpace(string(out)), false
	case len(names) > 0:
		return "noticed by " + string(names[len(names)-1][1]), true
	case bytes.Contains(out, []byte("panic: test timed out")):
		return "noticed by a test that did not end", true
	}
	return "noticed by the end of the test program", true
}

// overlay writes the file with the mutation, and for the go command where it is.
func (m mutation) overlay(dir string) (string, error) {
	text, err := os.ReadFile(m.file)
	if err != nil {
		return "", err
	}
	if n := strings.Count(string(text), m.old); n != 1 {
		return "", fmt.Errorf("GONE: the text is there %d times, want 1", n)
	}
	original, err := filepath.Abs(m.file)
	mutated, list := filepath.Join(dir, "mutated.go"), filepath.Join(dir, "overlay.json")
	replace, jsonErr := json.Marshal(map[string]map[string]string{"Replace": {original: mutated}})
	return list, errors.Join(err, jsonErr,
		os.WriteFile(mutated, []byte(strings.Replace(string(text), m.old, m.new, 1)), 0o600),
		os.WriteFile(list, replace, 0o600))
}
