package main

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/euryale-ml/euryale"
	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/env"
	"github.com/euryale-ml/euryale/observe"
	"github.com/euryale-ml/euryale/vm"
)

// troubles are what --trouble can make of a training.
var troubles = []string{"gpu", "rank", "bucket"}

const (
	stepsBefore = 20                    // that go well
	stepsIn     = 5                     // trouble
	late        = 1                     // the rank that has it
	resent      = 40                    // times that a slow bucket is exchanged
	leastLate   = 10 * time.Millisecond // more than the jitter of a step on the host
)

// checkTrouble returns why there cannot be this trouble.
func (o options) checkTrouble() error {
	if o.trouble != "" && (!slices.Contains(troubles, o.trouble) || o.ranks < 2 || o.watch != nil) {
		return fmt.Errorf("--trouble wants one of %v, and -n of 2 or more, without --observe",
			troubles)
	}
	return nil
}

// inTrouble trains, first well and then in trouble, and writes the verdicts of each step since.
func (o options) inTrouble(w io.Writer, name string, m model, p vm.Precision) (err error) {
	busy, err := o.otherProcess()
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, busy.stop()) }()
	if err := os.Setenv(string(env.Lateness), "1"); err != nil {
		return err
	}
	defer os.Unsetenv(string(env.Lateness))
	return euryale.Run(context.Background(), o.ranks, func(comm backend.Communicator,
		build sync.Locker) (err error) {
		on := rank{comm: comm, build: build, memory: o.memory}
		if on.device, err = o.deviceOf(comm); err != nil {
			return err
		}
		machine, loss, err := m.machine(p, on)
		if err != nil {
			return err
		}
		defer func() { err = errors.Join(err, machine.Close()) }()
		t := &observed{machine: machine, loss: loss, comm: comm, steps: stepsBefore}
		if o.trouble == "bucket" { // what is recorded does not change: another machine goes on
			on.comm = &congested{backend.Wrap(comm)}
			if t.machine, t.loss, err = m.machine(p, on); err != nil {
				return err
			}
			defer func(slow *vm.Machine) { err = errors.Join(err, slow.Close()) }(t.machine)
			if err := t.machine.RunAll(); err != nil { // not recorded
				return err
			}
		}
		ill := *t
		t.machine, t.loss = machine, loss
		before, err := t.round()
		if err != nil {
			return err
		}
		ill.steps = 1
		for step := range stepsIn {
			if step == 0 && comm.Rank() == late {
				if err := busy.start(); err != nil {
					return err
				}
			}
			if o.trouble == "rank" && comm.Rank() == late {
				ill.late = max(time.Duration(before/2)*time.Microsecond, leastLate)
			}
			took, err := ill.round()
			if err != nil {
				return err
			}
			verdicts := []string{}
			for _, v := range observe.WatchOf(comm).Verdicts() {
				verdicts = append(verdicts, v.String())
			}
			if comm.Rank() > 0 {
				continue
			}
			if err := json.NewEncoder(w).Encode(map[string]any{"mode": "trouble " + o.trouble,
				"model": name, "precision": p.String(), "step": step + 1, "step_us": round1(took),
				"before_us": round1(before), "verdicts": verdicts}); err != nil {
				return err
			}
		}
		return nil
	}, o.backends()...)
}

// congested is a communicator that exchanges the first bucket several times: its mean over ranks
// stays the same.
type congested struct{ backend.Base }

// Start implements [backend.Communicator].
func (c *congested) Start(q backend.Queue, what backend.Collective, dst, src backend.Buffer) (
	backend.Work, error) {
	return what.Start(c, q, dst, src)
}

// StartChecked implements [backend.CheckedStarter].
func (c *congested) StartChecked(q backend.Queue, what backend.Collective, count int, dst,
	src backend.Buffer) (backend.Work, error) {
	if o := what.Origin; o != nil && o.Purpose == backend.ForSync && o.Ordinal == 1 {
		for range resent - 1 {
			if _, err := c.Pass(q, what, count, dst, src); err != nil {
				return nil, err
			}
		}
	}
	return c.Pass(q, what, count, dst, src)
}

// other is a process that keeps a GPU busy. The methods of a nil one do nothing.
type other struct {
	*exec.Cmd
	input io.WriteCloser
}

// otherProcess starts one that is ready to keep the GPU of the late rank busy; nil for another
// trouble.
func (o options) otherProcess() (*other, error) {
	if o.trouble != "gpu" {
		return nil, nil
	}
	self, err := os.Executable()
	if err != nil {
		return nil, err
	}
	b := &other{Cmd: exec.Command(self, "--busy", "--device", o.device, "--models", o.models[0],
		"--layers", fmt.Sprint(o.layers), "--batch", fmt.Sprint(o.batch))}
	visible := []string{"0", "1"}
	if is := os.Getenv("CUDA_VISIBLE_DEVICES"); is != "" {
		visible = strings.Split(is, ",")
	}
	b.Env = append(os.Environ(), "CUDA_VISIBLE_DEVICES="+visible[min(late, len(visible)-1)])
	b.Stderr = os.Stderr
	output, err := b.StdoutPipe()
	if err == nil {
		b.input, err = b.StdinPipe()
	}
	if err == nil {
		err = b.Start()
	}
	if err != nil {
		return nil, err
	}
	_, err = bufio.NewReader(output).ReadString('\n')
	return b, err
}

// start makes the device busy.
func (b *other) start() error {
	if b == nil {
		return nil
	}
	_, err := b.input.Write([]byte("\n"))
	return err
}

// stop ends the process.
func (b *other) stop() error {
	if b == nil {
		return nil
	}
	return errors.Join(b.input.Close(), b.Wait())
}

// beBusy trains once, says so, and trains from the first line of the input to its end.
func (o options) beBusy(w io.Writer, in io.Reader) error {
	return o.onOne(func(on rank) error {
		of := models[o.models[0]].resized(o.layers, o.batch)
		m, _, err := of.machine(of.precisions[0], on)
		if err != nil {
			return err
		}
		for range warmUp {
			err = errors.Join(err, m.RunAll())
		}
		fmt.Fprintln(w, "ready")
		lines, over := bufio.NewReader(in), make(chan struct{})
		_, ended := lines.ReadString('\n')
		go func() {
			defer close(over)
			io.Copy(io.Discard, lines)
		}()
		for ended == nil && err == nil {
			select {
			case <-over:
				return m.Close()
			default:
				err = m.RunAll()
			}
		}
		return errors.Join(err, m.Close())
	})
}
