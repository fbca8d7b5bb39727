package main

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"sync"
	"time"

	"gorgonia.org/gorgonia"
)

// gorgonias names Gorgonia's tape machine as a peer.
const gorgonias = "gorgonia"

// peer trains the same model in another way.
type peer struct {
	name  string
	round func() (micros float64, err error) // of a step, after a round of them
	stop  func() error
}

// start starts the peer of the command line, nil if there is none.
func (o options) start(name string, m model) (*peer, error) {
	switch o.peer {
	case "":
		return nil, nil
	case gorgonias:
		return o.startGorgonia(m)
	}
	return o.startTorch(name)
}

func (p *peer) close() error {
	if p == nil {
		return nil
	}
	return p.stop()
}

// startGorgonia runs the graph by a tape machine, and the solver after it.
func (o options) startGorgonia(m model) (*peer, error) {
	b, _, err := m.graph(0, &sync.Mutex{})
	if err != nil {
		return nil, err
	}
	tape, solver := gorgonia.NewTapeMachine(b.graph, gorgonia.BindDualValues(b.learnables...)),
		m.solver()
	round := func() (float64, error) {
		begin := time.Now()
		for range o.steps {
			if err := tape.RunAll(); err != nil {
				return 0, err
			}
			if err := solver.Step(gorgonia.NodesToValueGrads(b.learnables)); err != nil {
				return 0, err
			}
			tape.Reset()
		}
		return micros(time.Since(begin)) / float64(o.steps), nil
	}
	return &peer{gorgonias, round, tape.Close}, nil
}

// startTorch runs train_torch.py, which runs a round for each line and answers with its time.
func (o options) startTorch(model string) (*peer, error) {
	cmd := exec.Command(o.python, o.peer, "--serve", "--device", "cpu", "--modes", o.peerMode,
		"--models", model, "-n", strconv.Itoa(o.ranks), "--steps", strconv.Itoa(o.steps))
	cmd.Stderr = os.Stderr
	in, err := cmd.StdinPipe()
	if err != nil {
		return nil, err
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		return nil, err
	}
	if err := cmd.Start(); err != nil {
		return nil, fmt.Errorf("%s: %w", o.peer, err)
	}
	lines := bufio.NewReader(out)
	round := func() (float64, error) {
		if _, err := io.WriteString(in, "round\n"); err != nil {
			return 0, err
		}
		line, err := lines.ReadString('\n')
		if err != nil {
			return 0, fmt.Errorf("it has ended, standard error says why: %w", err)
		}
		return strconv.ParseFloat(strings.TrimSpace(line), 64)
	}
	end := func() error { return errors.Join(in.Close(), cmd.Wait()) }
	return &peer{"pytorch " + o.peerMode, round, end}, nil
}
