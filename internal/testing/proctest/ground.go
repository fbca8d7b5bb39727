package proctest

import (
	"errors"
	"fmt"
	"os"
	"sync"
)

// Ground is a [T] of a program that is no test: what it needs besides processes, such as machines.
type Ground struct {
	mu       sync.Mutex
	cleanups []func()
	errs     []error
}

// ErrLacking is the error of what a Ground's system lacks, where a test would be skipped.
var ErrLacking = errors.New("not on this system")

// unfit is what a Ground panics with where a test ends.
type unfit struct{ error }

// Helper does nothing.
func (g *Ground) Helper() {}

// Cleanup has Leave call f.
func (g *Ground) Cleanup(f func()) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.cleanups = append(g.cleanups, f)
}

// TempDir makes a directory that Leave removes.
func (g *Ground) TempDir() string {
	dir, err := os.MkdirTemp("", "euryale-")
	if err != nil {
		g.Fatal(err)
	}
	g.Cleanup(func() { os.RemoveAll(dir) })
	return dir
}

// Errorf keeps an error for Leave.
func (g *Ground) Errorf(format string, args ...any) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.errs = append(g.errs, fmt.Errorf(format, args...))
}

// Fatal ends Run.
func (g *Ground) Fatal(args ...any) { panic(unfit{errors.New(fmt.Sprint(args...))}) }

// Fatalf ends Run.
func (g *Ground) Fatalf(format string, args ...any) { panic(unfit{fmt.Errorf(format, args...)}) }

// Skipf ends Run with ErrLacking.
func (g *Ground) Skipf(format string, args ...any) {
	panic(unfit{fmt.Errorf("%w: %s", ErrLacking, fmt.Sprintf(format, args...))})
}

// Run runs f and returns its error, or what it has ended with.
func (g *Ground) Run(f func() error) (err error) {
	defer func() {
		if v := recover(); v != nil {
			end, ok := v.(unfit)
			if !ok {
				panic(v)
			}
			err = end.error
		}
	}()
	return f()
}

// Leave cleans up, and returns the errors of it all.
func (g *Ground) Leave() error {
	for {
		g.mu.Lock()
		n := len(g.cleanups)
		if n == 0 {
			defer g.mu.Unlock()
			return errors.Join(g.errs...)
		}
		f := g.cleanups[n-1]
		g.cleanups = g.cleanups[:n-1]
		g.mu.Unlock()
		if err := g.Run(func() error { f(); return nil }); err != nil {
			g.Errorf("clean up: %w", err)
		}
	}
}
