// Command stocktests runs Gorgonia's own tests through package vm:
//
//	go run ./internal/tools/stocktests      print what differs
//	go run ./internal/tools/stocktests -w   write the table of docs/ops.md, too
//
// It copies Gorgonia v0.9.18 from the module cache to a temporary folder and puts a hook into the
// RunAll of the tape machine and of the lisp machine. Whenever a test or an example has run a
// graph, the hook runs it in package vm, from the same values of the variables, three times with
// every node kept and three times as it would be planned, and compares every node and gradient. A
// value over which the other machine has written since is compared with the operation's Do.
//
// The exit status is 1 if something differs that the list of reasons does not have. It needs the
// module proxy for what only Gorgonia's tests import.
package main

import (
	"bytes"
	"embed"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
)

// hooks are compiled in the copy. Their names here keep them out of this package.
//
//go:embed hook.go.txt hook_test.go.txt
var hooks embed.FS

// page is the table's file, of package optable, which puts it into docs/ops.md.
const page = "internal/tools/optable/stocktests.md"

func main() {
	write := flag.Bool("w", false, "write "+page)
	flag.Parse()
	if err := run(*write); err != nil {
		fmt.Fprintln(os.Stderr, "stocktests:", err)
		os.Exit(1)
	}
}

func run(write bool) error {
	dir, err := os.MkdirTemp("", "stocktests")
	if err != nil {
		return err
	}
	defer func() { _ = os.RemoveAll(dir) }()
	if err := prepare(dir); err != nil {
		return err
	}
	results, err := test(dir)
	if err != nil {
		return err
	}
	text, unexplained := table(results)
	fmt.Print(text)
	if unexplained != nil {
		return fmt.Errorf("%d differences have no reason in reasons.go:\n%s", len(unexplained),
			strings.Join(unexplained, "\n"))
	}
	if write {
		return os.WriteFile(page, []byte(text), 0o644)
	}
	return nil
}

// output runs a command of go in a folder and returns what it prints.
func output(dir string, args ...string) (string, error) {
	command := exec.Command("go", args...)
	command.Dir = dir
	var problem bytes.Buffer
	command.Stderr = &problem
	text, err := command.Output()
	if err != nil {
		err = fmt.Errorf("go %s: %w: %s", strings.Join(args, " "), err, problem.Bytes())
	}
	return strings.TrimSpace(string(text)), err
}

// prepare copies Gorgonia into dir, with the hook.
func prepare(dir string) error {
	stock, err := output(".", "list", "-m", "-f", "{{.Dir}}", "gorgonia.org/gorgonia")
	if err != nil {
		return err
	}
	here, err := output(".", "list", "-m", "-f", "{{.Dir}}")
	if err != nil {
		return err
	}
	if err := duplicate(stock, dir); err != nil {
		return err
	}
	machines := map[string]string{"vm_tape.go": "tapeMachine", "vm_genera.go": "lispMachine"}
	for name, machine := range machines {
		if err := rename(filepath.Join(dir, name), machine); err != nil {
			return err
		}
	}
	for _, name := range []string{"hook.go", "hook_test.go"} {
		text, err := hooks.ReadFile(name + ".txt")
		if err == nil {
			err = os.WriteFile(filepath.Join(dir, name), text, 0o644)
		}
		if err != nil {
			return err
		}
	}
	mod := "module gorgonia.org/gorgonia\n\ngo 1.26\n\nrequire github.com/euryale-ml/euryale " +
		"v0.0.0\n\n" +
		"replace github.com/euryale-ml/euryale => " + here + "\n"
	if err := os.WriteFile(filepath.Join(dir, "go.mod"), []byte(mod), 0o644); err != nil {
		return err
	}
	_, err = output(dir, "mod", "tidy")
	return err
}

// duplicate copies a module without the packages that have modules of their own, or are no part of
// its tests.
func duplicate(from, to string) error {
	return filepath.WalkDir(from, func(path string, entry fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		rest, err := filepath.Rel(from, path)
		if err != nil {
			return err
		}
		if entry.IsDir() {
			if slices.Contains([]string{"cmd", "docs", "media", "x", "cuda modules"}, rest) {
				return fs.SkipDir
			}
			return os.MkdirAll(filepath.Join(to, rest), 0o755)
		}
		if strings.HasPrefix(rest, "examples") && filepath.Ext(rest) == ".go" {
			return nil
		}
		text, err := os.ReadFile(path)
		if err != nil {
			return err
		}
		return os.WriteFile(filepath.Join(to, rest), text, 0o644)
	})
}

// rename gives the RunAll of a machine the name that the hook calls.
func rename(file, machine string) error {
	text, err := os.ReadFile(file)
	if err != nil {
		return err
	}
	old := "func (m *" + machine + ") RunAll() "
	if !bytes.Contains(text, []byte(old)) {
		return fmt.Errorf("%s has no %q: this is not Gorgonia v0.9.18", file, old)
	}
	text = bytes.Replace(text, []byte(old), []byte("func (m *"+machine+") stockRunAll() "), 1)
	return os.WriteFile(file, text, 0o644)
}

// result is what the hook writes for a run.
type result struct {
	Test, Machine, Outcome, Node, Text string
}

// test runs the tests and returns what the hook has written. Tests of Gorgonia that fail by
// themselves, such as an example whose output depends on random numbers, are no error.
func test(dir string) (results []result, err error) {
	file := filepath.Join(dir, "results")
	command := exec.Command("go", "test", "-vet=off", ".")
	command.Dir, command.Env = dir, append(os.Environ(), "EURYALE_TEST_STOCK="+file)
	said, failure := command.CombinedOutput()
	if exit := (*exec.ExitError)(nil); failure != nil && !errors.As(failure, &exit) {
		return nil, failure
	}
	text, err := os.ReadFile(file)
	if err != nil {
		return nil, fmt.Errorf("the tests did not run: %w: %s", err, said)
	}
	for _, l := range strings.Split(strings.TrimSpace(string(text)), "\n") {
		var r result
		if err := json.Unmarshal([]byte(l), &r); err != nil {
			return nil, fmt.Errorf("the hook wrote %q: %w", l, err)
		}
		results = append(results, r)
	}
	return results, nil
}
