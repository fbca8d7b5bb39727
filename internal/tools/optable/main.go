// Command optable prints what every operation of Gorgonia computes: whether its value equals that
// of a plain loop, and whether its gradient is the derivative of that loop. Its output is
// docs/ops.md.
//
//	go run ./internal/tools/optable        print the table
//	go run ./internal/tools/optable -w     write it to docs/ops.md, from the root of the module
//
// Every row builds a small graph and runs it in float64 and float32. The gradient comes from
// gorgonia.Grad in the tape machine, and from the lisp machine; both are compared with central
// differences of the loop. A row can build several results from the same operands: those with
// different values must be different nodes.
package main

import (
	"flag"
	"fmt"
	"os"
)

// page is the file that holds the output.
const page = "docs/ops.md"

func main() {
	write := flag.Bool("w", false, "write "+page)
	from := flag.Int("from", -1, "judge the cells from this one, for the command itself")
	flag.Parse()
	if err := run(*write, *from); err != nil {
		fmt.Fprintln(os.Stderr, "optable:", err)
		os.Exit(1)
	}
}

func run(write bool, from int) error {
	if from >= 0 {
		return judgeFrom(from)
	}
	said, err := verdicts()
	if err != nil {
		return err
	}
	text, err := document(said)
	if err != nil {
		return err
	}
	if !write {
		_, err := os.Stdout.WriteString(text)
		return err
	}
	return os.WriteFile(page, []byte(text), 0o644)
}
