package main

import (
	"bufio"
	"bytes"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"regexp"
	"strconv"
)

// The machines of Gorgonia run graphs on goroutines of their own, so a panic of an operation ends
// the program. Child processes judge the cells in order; where one ends early, the next goes on
// behind the cell that ended it.

// cell counts the columns of all rows.
func cell(row int, c column) int { return row*int(columns) + int(c) }

// all rows of all sections.
func rows() (all []row) {
	for _, s := range sections() {
		all = append(all, s.rows...)
	}
	for i := range all {
		all[i].slope = new([]array)
	}
	return all
}

// judgeFrom is a child process: it prints a line for each cell.
func judgeFrom(from int) error {
	for i, r := range rows() {
		for c := range columns {
			if cell(i, c) < from {
				continue
			}
			if _, err := fmt.Println(strconv.Quote(judge(r, c))); err != nil {
				return err
			}
		}
	}
	return nil
}

// verdicts judges all rows.
func verdicts() ([]verdict, error) {
	all := make([]verdict, len(rows()))
	self, err := os.Executable()
	if err != nil {
		return nil, err
	}
	// Gorgonia writes err.dot where it finds a mistake in types
	dir, err := os.MkdirTemp("", "optable")
	if err != nil {
		return nil, err
	}
	defer func() { _ = os.RemoveAll(dir) }()
	for done := 0; done < cell(len(all), value); {
		said, err := child(self, dir, done)
		if err != nil {
			return nil, err
		}
		if len(said) == 0 {
			return nil, fmt.Errorf("the child process said nothing of cell %d", done)
		}
		for _, text := range said {
			all[done/int(columns)][done%int(columns)] = text
			done++
		}
	}
	return all, nil
}

// child runs a child process in dir and returns what it says of the cells from the given one. The
// last is the one that ended it, if that is how it ended.
func child(self, dir string, from int) (said []string, err error) {
	command := exec.Command(self, "-from", strconv.Itoa(from))
	command.Dir = dir
	var problem bytes.Buffer
	command.Stderr = &problem
	output, failure := command.Output()
	for lines := bufio.NewScanner(bytes.NewReader(output)); lines.Scan(); {
		text, err := strconv.Unquote(lines.Text())
		if err != nil {
			return nil, fmt.Errorf("a child process said %q: %w", lines.Text(), err)
		}
		said = append(said, text)
	}
	if failure == nil {
		return said, nil
	}
	panicked := panicOf.FindSubmatch(problem.Bytes())
	if exit := (*exec.ExitError)(nil); !errors.As(failure, &exit) || panicked == nil {
		return nil, fmt.Errorf("a child process: %w: %s", failure, problem.Bytes())
	}
	return append(said, "ends the program: "+plain(string(panicked[1]))), nil
}

// panicOf finds the message of a panic in the output of a program.
var panicOf = regexp.MustCompile(`(?m)^panic: (.*)$`)
