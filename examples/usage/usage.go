// Package usage is what users see of all examples: bars, and ends for wrong flags, which errors
// name, and for other errors:
//
//	usage.Check("moe", usage.AtLeast(1, "layers", "width"),
//		usage.OneOf("device", "cpu", "auto"), usage.NoArguments())
package usage

import (
	"errors"
	"flag"
	"fmt"
	"log"
	"os"
	"slices"
	"strconv"
	"strings"

	"github.com/euryale-ml/euryale"
)

// Check ends the program for a wrong command line, with a code for which no launcher starts it
// again. errs are nil for what is right.
func Check(program string, errs ...error) {
	if err := errors.Join(errs...); err != nil {
		log.Print(program, ": ", strings.ReplaceAll(err.Error(), "\n", "; "))
		os.Exit(2)
	}
}

// End ends the program for an error, with the code by which launchers judge it.
func End(program string, err error) {
	if err != nil {
		log.Print(program, ": ", err)
		os.Exit(euryale.ExitStatus(err))
	}
}

// AtLeast checks flags with numbers.
func AtLeast(least float64, names ...string) (err error) {
	for _, name := range names {
		value := flag.Lookup(name).Value.String()
		if x, wrong := strconv.ParseFloat(value, 64); wrong != nil || !(x >= least) {
			err = errors.Join(err, fmt.Errorf("--%s %s: use a number of at least %g", name, value,
				least))
		}
	}
	return err
}

// OneOf checks a flag with words.
func OneOf(name string, words ...string) error {
	value := flag.Lookup(name).Value.String()
	if slices.Contains(words, value) {
		return nil
	}
	last := len(words) - 1
	return fmt.Errorf("--%s %s: use %s or %s", name, value, strings.Join(words[:last], ", "),
		words[last])
}

// Unless returns the error of a flag whose value is wrong, and says what to use.
func Unless(right bool, name, use string, args ...any) error {
	if right {
		return nil
	}
	given := strings.TrimSpace(name + " " + flag.Lookup(name).Value.String())
	return fmt.Errorf("--%s: use %s", given, fmt.Sprintf(use, args...))
}

// Given returns an error that says how to call the program, unless what it needs is given.
func Given(all bool, call string) error {
	if all {
		return nil
	}
	return fmt.Errorf("use %s: got %q", call, os.Args[1:])
}

// NoArguments refuses what is no flag.
func NoArguments() error {
	if flag.NArg() == 0 {
		return nil
	}
	return fmt.Errorf("%q: the program takes flags alone", flag.Args())
}
