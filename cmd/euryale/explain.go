package main

import (
	"errors"
	"fmt"
	"io"
	"strconv"
	"strings"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/backend/hierarchy"
	"github.com/euryale-ml/euryale/backend/lowlatency"
	"github.com/euryale-ml/euryale/bench"
)

// explainCmd says how a collective would run, and why.
type explainCmd struct {
	Collective string     `arg:"" help:"allreduce, reducescatter, allgather, alltoall, broadcast, reduce, gather or scatter."`
	Size       bench.Size `arg:"" help:"Bytes of the largest buffer; K, M and G are powers of two."`
	N          int        `short:"n" help:"Number of ranks; those of the topology, else 2, if not given."`
	DType      string     `name:"dtype" default:"f32" help:"f16, bf16, f32, f64, i32, i64 or u8."`
	Op         string     `default:"sum" help:"sum, avg, prod, min or max, where the collective reduces."`
	Device     string     `placeholder:"MODEL" help:"Model of the GPUs, such as \"NVIDIA H200\"; this machine's if not given."`
	Link       string     `placeholder:"CLASS" help:"How GPUs of a machine are connected: pcie, cube-mesh or fully-connected; as this machine's if not given, and fully-connected with --device."`
	LowLatency string     `name:"lowlatency" env:"EURYALE_LOWLATENCY" default:"auto" help:"auto, off, or an algorithm to use wherever it can be."`
	Topology   string     `env:"EURYALE_TOPOLOGY" help:"Machines x devices, such as 2x4: shows the hierarchical plan."`
	Hierarchy  string     `env:"EURYALE_HIERARCHY" default:"auto" help:"auto, always or never."`
	Inside     string     `placeholder:"LINK" help:"Links inside a machine: latency and bandwidth, such as 3us+200GB/s; as measured, else round numbers, if not given."`
	Between    string     `placeholder:"LINK" help:"Links between machines; 1/10 stands for a tenth of the bandwidth inside."`
}

// Help is what --help says below the flags' titles.
func (explainCmd) Help() string {
	return `Nothing is run: the answer follows from measured times, those of euryale bench --tune before those shipped with this program. So it can be given for another machine, too.

Examples: euryale explain allreduce 2M -n 4 --dtype bf16 --device "NVIDIA H200"
euryale explain allreduce 25M --topology 2x4 --inside 3us+200GB/s --between 1/10`
}

// Run writes the explanations.
func (e *explainCmd) Run(s *streams) error {
	q, err := e.question()
	if err != nil {
		return fmt.Errorf("explain: %w", err)
	}
	kernels, kernelsErr := e.kernels(q)
	plan, planErr := e.plan(q)
	if err := errors.Join(kernelsErr, planErr); err != nil {
		return fmt.Errorf("explain: %w", err)
	}
	_, err = io.WriteString(s.out, kernels+plan)
	return err
}

// question is what is asked.
type question struct {
	what   backend.Collective
	dtype  backend.DType
	nbytes int // of the largest operand
	ranks  int
	model  string
	link   lowlatency.Link
	absent error // no GPUs were named, and why there are none
}

// question reads the command line.
func (e *explainCmd) question() (q question, err error) {
	var kindErr, opErr, dtypeErr, deviceErr error
	q.nbytes, q.ranks = int(e.Size), e.ranks()
	q.what.Kind, kindErr = backend.ParseKind(e.Collective)
	q.what.Op, opErr = backend.ParseReduceOp(e.Op)
	q.dtype, dtypeErr = backend.ParseDType(e.DType)
	q.model, q.link, deviceErr = e.devices(&q)
	if err := errors.Join(kindErr, opErr, dtypeErr, deviceErr); err != nil {
		return q, err
	}
	if q.ranks < 1 {
		return q, fmt.Errorf("%d ranks: there must be at least 1", q.ranks)
	}
	return q, nil
}

// ranks returns how many ranks there are: those that a topology has, if they were not
// given.
func (e *explainCmd) ranks() int {
	if e.N != 0 {
		return e.N
	}
	var M, D int
	if n, _ := fmt.Sscanf(e.Topology, "%dx%d", &M, &D); n == 2 {
		return M * D
	}
	if list := strings.Split(e.Topology, ","); len(list) > 1 {
		return len(list)
	}
	return 2
}

// devices returns the GPUs that are asked about. That this machine has none is noted
// in q.
func (e *explainCmd) devices(q *question) (model string, link lowlatency.Link, err error) {
	if e.Device == "" {
		model, link, q.absent = survey(q.ranks)
	} else {
		model, link = e.Device, lowlatency.FullyConnected
	}
	if e.Link != "" {
		link, err = lowlatency.ParseLink(e.Link)
	}
	return model, link, err
}

// survey returns what this machine's GPUs are, the first ones if there are more than
// ranks.
func survey(ranks int) (model string, link lowlatency.Link, err error) {
	g, err := openGPUs()
	if err != nil {
		return "", lowlatency.Unknown, err
	}
	defer func() { err = errors.Join(err, g.close()) }()
	var devices []backend.Device
	for _, c := range g.cards[:min(len(g.cards), ranks)] {
		devices = append(devices, c.device())
	}
	if len(devices) < 2 {
		return "", lowlatency.Unknown, fmt.Errorf("%d of %d ranks have a GPU here: see euryale doctor", len(devices), ranks)
	}
	return lowlatency.Survey(devices)
}

// kernels explains the choice of an algorithm on one machine.
func (e *explainCmd) kernels(q question) (string, error) {
	o, err := lowlatency.Parse(e.LowLatency)
	if err != nil {
		return "", err
	}
	if q.absent != nil {
		reason, _, _ := strings.Cut(q.absent.Error(), "\n")
		return fmt.Sprintf("low-latency kernels: name GPUs by --device, such as %q, for there are none to ask about here: %s\n", lowlatency.Shipped()[0].Model, reason), nil
	}
	nbytes := operand(q.what.Kind, q.nbytes, q.ranks)
	text, err := lowlatency.Machine{Model: q.model, Link: q.link, Ranks: q.ranks}.Explain(o, q.what, q.dtype, nbytes)
	return strings.TrimRight(text, "\n") + "\n", err
}

// plan explains the choice between flat and hierarchical, where there is one.
func (e *explainCmd) plan(q question) (string, error) {
	if e.Topology == "" {
		return "", nil
	}
	layout, err := hierarchy.Parse(e.Topology, q.ranks)
	if err != nil {
		return "", err
	}
	mode, err := hierarchy.ParseMode(e.Hierarchy)
	if err != nil {
		return "", err
	}
	links, source, err := e.links(q.model, layout)
	if err != nil {
		return "", err
	}
	plan, err := hierarchy.NewPlan(layout, hierarchy.Options{Mode: mode, Links: &links})
	if err != nil {
		return "", err
	}
	return plan.Explain(q.what, q.dtype, q.nbytes) + "  links are     " + source + "\n", nil
}

// links returns the links to predict by, and where their numbers come from.
func (e *explainCmd) links(model string, l hierarchy.Layout) (links hierarchy.Links, source string, err error) {
	links, source = hierarchy.DefaultLinks(), "round numbers: euryale bench --tune measures, --inside and --between declare"
	for _, declared := range []bool{true, false} { // real machines count for more
		m, found, err := hierarchy.Measured(model, l, declared)
		if err != nil {
			return links, "", err
		}
		if found {
			links, source = m.Links, "measured: "+m.Source
		}
	}
	if e.Inside != "" {
		source = "as declared"
		if links.Inside, err = hierarchy.ParseLink(e.Inside); err != nil {
			return links, "", fmt.Errorf("--inside: %w", err)
		}
	}
	if e.Between != "" {
		source = "as declared"
		if links.Between, err = part(e.Between, links.Inside); err != nil {
			return links, "", fmt.Errorf("--between: %w", err)
		}
	}
	return links, source, nil
}

// part reads a link, which "1/10" gives a share of the bandwidth of another one.
func part(text string, of hierarchy.Link) (hierarchy.Link, error) {
	if denominator, ok := strings.CutPrefix(text, "1/"); ok {
		if n, err := strconv.ParseFloat(denominator, 64); err == nil && n > 0 {
			return hierarchy.Link{Latency: of.Latency, Bandwidth: of.Bandwidth / n}, nil
		}
	}
	return hierarchy.ParseLink(text)
}
