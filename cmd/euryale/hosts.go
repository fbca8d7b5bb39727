package main

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"os/signal"
	"strings"
	"syscall"

	"github.com/euryale-ml/euryale/internal/cuda"
	"github.com/euryale-ml/euryale/internal/launch"
)

// hostCmd is the launcher of a host, which euryale run -H starts there.
type hostCmd struct{}

// Run takes orders over the standard input.
func (hostCmd) Run(ctx context.Context, s *streams) error {
	_, stop := jobSignals() // a broken connection must not end it before its ranks
	defer stop()
	told := make(chan os.Signal, 1)
	signal.Notify(told, syscall.SIGTERM) // as before the machine goes away
	defer signal.Stop(told)
	return launch.Serve(ctx, s.in, s.out, gpuAdvice, told)
}

// gpuAdvice says what a program with GPU support lacks on this machine, as the doctor does.
func gpuAdvice() (lines []string) {
	findings := backends(context.Background())
	g, err := openGPUs()
	switch {
	case err != nil:
		findings = append(findings, finding{about: "gpu", err: err})
		fallthrough
	case len(g.usable) == 0: // these libraries can be looked for without one
		for _, l := range cuda.Libraries() {
			if l.Find() == "" {
				lines = append(lines, strings.TrimSpace(strings.TrimPrefix(found(l), "# ")))
			}
		}
	default:
		facts, err := g.usable[0].facts()
		findings = append(findings, finding{about: g.usable[0].Name(), err: err})
		lines = missing(facts)
	}
	if g != nil {
		findings = append(append(findings, g.problems...), finding{about: "gpu", err: g.close()})
	}
	for _, f := range findings {
		if f.err != nil && f.about != "backend mpi" {
			lines = append(lines, f.about+": "+f.err.Error())
		}
	}
	return lines
}

// missing returns what the facts of a GPU say of libraries that were not found.
func missing(facts string) (lines []string) {
	for line := range strings.Lines(facts) {
		if strings.Contains(line, " was not found: ") {
			lines = append(lines, strings.TrimSpace(line))
		}
	}
	return lines
}

// hosts returns the hosts of -H or --hostfile, nil if there are none.
func (c *runCmd) hosts() (hosts []launch.Host, err error) {
	flag := "-H " + c.Hosts
	switch {
	case c.Hosts != "":
		hosts, err = launch.ParseHosts(c.Hosts)
	case c.Hostfile != "":
		flag = "--hostfile " + c.Hostfile
		var text []byte
		if text, err = os.ReadFile(c.Hostfile); err == nil {
			hosts, err = launch.ReadHostfile(bytes.NewReader(text))
		}
	}
	if err != nil {
		return nil, usageError{fmt.Errorf("%s: %w", flag, err)}
	}
	return hosts, nil
}
