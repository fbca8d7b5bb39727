package gpu

import (
	"fmt"
	"slices"
	"strconv"

	"github.com/euryale-ml/euryale/backend"
)

// Survey describes a group that need not exist: ranks on devices of one model. Measured times
// are found by it. A user who names a model need know neither Capability nor NVLinks: 0 finds
// what was measured on that very model.
type Survey struct {
	Model      string
	Capability int // compute capability, 90 for 9.0
	Link       Link
	NVLinks    int // between two devices, of the pair with the fewest; 0 where Link is PCIe
	Ranks      int
	Tears      bool // as of wiring
}

// Explain is [Communicator.Explain] of a group of the machine's, by a table and an
// algorithm to force, both as in [Options].
func (m Survey) Explain(o Options, what backend.Collective, d backend.DType, nbytes int) (string,
	error) {
	if m.Ranks < 1 {
		return "", fmt.Errorf("%w: a group of %d ranks", backend.ErrArgument, m.Ranks)
	}
	if !what.Kind.Valid() || !d.Valid() {
		return "", fmt.Errorf("%w: %v of %v: there is no such call", backend.ErrArgument,
			what.Kind, d)
	}
	o.Link = m.Link
	o, err := o.measured(0)
	if err != nil {
		return "", err
	}
	p, why := decide(o.settings(), m.ranks())
	p.NVLinks = m.NVLinks
	c := newChoice(p, why)
	if c.why == "" && o.Off {
		c.why = "it is switched off"
	}
	if o.measure {
		c.lacks = fmt.Sprintf("ranks measure for up to %v when they connect", measureTime)
	}
	return c.explain(what, d, nbytes, 0), nil
}

// Algorithms returns what sums of the group may run on, NCCL first.
func (m Survey) Algorithms() []Algorithm {
	p, why := decide(Options{Link: m.Link}.settings(), m.ranks())
	if why != "" {
		return []Algorithm{byNCCL}
	}
	return slices.DeleteFunc(m.Link.Algorithms(), func(a Algorithm) bool {
		return a == byLL128TwoShot && !p.lines ||
			a != byNCCL && !algorithms[a].runs(backend.AllReduce)
	})
}

// ranks are what the ranks would tell each other.
func (m Survey) ranks() []rankInfo {
	all := make([]rankInfo, m.Ranks)
	for r := range all {
		all[r] = rankInfo{Model: m.Model, Capability: m.Capability,
			Wires: wiring{Bus: strconv.Itoa(r), Tears: m.Tears}}
	}
	return all
}

// SurveyOf returns the machine of ranks on these devices. It fails if they are no GPUs, or of
// different models.
func SurveyOf(devices []backend.Device) (Survey, error) {
	if err := backend.Given("gpu.Survey", "devices", devices); err != nil {
		return Survey{}, err
	}
	m := Survey{Ranks: len(devices)}
	var wires []wiring
	for _, d := range devices {
		g, ok := d.(Device)
		if !ok {
			return Survey{}, fmt.Errorf("%s is a %T, not a GPU", d.Name(), d)
		}
		if m.Model == "" {
			m.Model, m.Capability = g.Model(), g.ComputeCapability()
		}
		if g.Model() != m.Model {
			return Survey{}, fmt.Errorf("%s is a %s, and %s a %s: low-latency kernels take one "+
				"model", devices[0].Name(), m.Model, d.Name(), g.Model())
		}
		w := wiresOf(g)
		m.Tears = m.Tears || w.Tears
		wires = append(wires, w)
	}
	t := classify(wires)
	m.Link, m.NVLinks = t.Link, t.NVLinks
	return m, nil
}
