package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"strconv"
	"strings"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/backend/host"
	"github.com/euryale-ml/euryale/backend/tcp"
	"github.com/euryale-ml/euryale/internal/bench"
	"github.com/euryale-ml/euryale/internal/env"
	"github.com/euryale-ml/euryale/internal/gpu"
	"github.com/euryale-ml/euryale/internal/hierarchy"
)

// explainCmd explains which algorithm a collective would use.
type explainCmd struct {
	Collective string     `arg:"" predictor:"collective" help:"allreduce, reducescatter, allgather, alltoall, broadcast, reduce, gather or scatter."`
	Size       bench.Size `arg:"" help:"Bytes of the largest buffer; K, M and G are powers of two."`
	N          *int       `short:"n" help:"Number of ranks; those of the topology, else 2, if not given."`
	DType      string     `name:"dtype" default:"f32" predictor:"dtype" help:"f16, bf16, f32, f64, i32, i64 or u8."`
	Op         string     `default:"sum" predictor:"op" help:"sum, avg, prod, min or max, where the collective reduces."`
	Device     string     `placeholder:"MODEL" help:"Model of the GPUs, such as \"NVIDIA H200\"; this machine's if not given."`
	Link       string     `placeholder:"CLASS" predictor:"link" help:"How GPUs of a machine are connected: pcie, cube-mesh or fully-connected; as this machine's if not given, and fully-connected with --device."`
	Backend    string     `predictor:"backend" help:"host or tcp; if not given, of GPUs if there are any, else host on one machine and tcp on several."`
	LowLatency string     `name:"lowlatency" help:"auto, off, or an algorithm to use wherever it can be; if not given, what EURYALE_LOWLATENCY says, or auto."`
	Topology   string     `placeholder:"MxD" help:"Machines x devices that there are, such as 2x4: shows the hierarchical plan. If not given, what EURYALE_TOPOLOGY declares of this machine."`
	Hierarchy  string     `help:"auto, always or never, and options, such as auto,exchange=bf16; if not given, what EURYALE_HIERARCHY says, or auto, but always where EURYALE_TOPOLOGY declares machines."`
	Inside     string     `placeholder:"LINK" help:"Links inside a machine: latency and bandwidth, such as 3us+200GB/s; as measured, else round numbers, if not given."`
	Between    string     `placeholder:"LINK" help:"Links between machines; 1/10 stands for a tenth of the bandwidth inside."`
	Scale      bool       `help:"Predict calls, starts and recoveries of 8 to 4,096 ranks."`
	Plot       string     `placeholder:"FILE" predictor:"file" help:"Draw what --scale predicts, as .svg or .png."`
}

// Help is what --help says below the flags' titles.
func (explainCmd) Help() string {
	return `The command runs no collective. Without GPUs, the answer is the algorithm of shared
memory (backend host) or, among machines, of sockets (backend tcp), and its thresholds. With GPUs,
of this machine or of --device, the answer comes from measured times: those of euryale bench
--tune, else built-in ones for the same model or compute capability, links and ranks, else those
that ranks have measured as they connected. NCCL runs the calls for which none of Euryale's kernels
is faster.

With --topology, the answer is for real machines, with measured links or those of --inside and
--between, and among ranks without GPUs over sockets (backend tcp). With EURYALE_TOPOLOGY instead,
the answer is for a program on this machine alone: the links between declared machines are those
inside it.

Examples:

	euryale explain allreduce 2M -n 4
	euryale explain allreduce 2M -n 4 --dtype bf16 --device "NVIDIA H200"
	euryale explain allreduce 25M --topology 2x4 --between 1/10
	euryale explain allreduce 64M --topology 2x8 --scale --plot scale.svg`
}

// Run writes the explanations.
func (e *explainCmd) Run(ctx context.Context, s *streams) error {
	q, err := e.question()
	if err != nil {
		return usageError{fmt.Errorf("explain: %w", err)}
	}
	calls, callsErr := e.calls(q)
	plan, planErr := e.plan(q)
	if err := errors.Join(callsErr, planErr); err != nil {
		err = fmt.Errorf("explain: %w", err)
		if errors.Is(err, backend.ErrArgument) {
			return usageError{err}
		}
		return err
	}
	if ctx.Err() != nil {
		return fmt.Errorf("explain: %w", context.Cause(ctx))
	}
	_, err = io.WriteString(s.out, calls+plan)
	return err
}

// question is what is asked.
type question struct {
	what   backend.Collective
	dtype  backend.DType
	nbytes int // of the largest operand
	ranks  int
	gpus   gpu.Survey
	absent error // why there are no GPUs, if none were named
}

// The limits of a question. The plan lists all ranks, so a typing error could take all
// memory.
const (
	maxRanks = 1 << 16
	maxBytes = 1 << 40
)

// question reads the command line.
func (e *explainCmd) question() (q question, err error) {
	var kindErr, opErr, dtypeErr, deviceErr error
	q.nbytes, q.ranks = int(e.Size), e.ranks()
	q.what.Kind, kindErr = backend.ParseKind(e.Collective)
	q.what.Op, opErr = backend.ParseReduceOp(e.Op)
	q.dtype, dtypeErr = backend.ParseDType(e.DType)
	deviceErr = e.devices(&q)
	if err := errors.Join(kindErr, opErr, dtypeErr, deviceErr); err != nil {
		return q, err
	}
	switch {
	case e.Plot != "" && !e.Scale:
		return q, errors.New("--plot draws what --scale predicts: ask for both")
	case q.ranks < 1 || q.ranks > maxRanks:
		return q, fmt.Errorf("%d ranks: there must be at least 1, and at most %d (-n, or the "+
			"product of --topology)", q.ranks, maxRanks)
	case q.nbytes > maxBytes:
		return q, fmt.Errorf("%v bytes: it must be at most %v", e.Size, bench.Size(maxBytes))
	}
	return q, nil
}

// ranks returns the number of ranks: -n, else that of the topology, else 2.
func (e *explainCmd) ranks() int {
	if e.N != nil {
		return *e.N
	}
	topology, _ := e.topology()
	var M, D int
	if n, _ := fmt.Sscanf(topology, "%dx%d", &M, &D); n == 2 {
		if M > maxRanks || D > maxRanks { // the product could overflow
			return max(M, D)
		}
		return M * D
	}
	if list := strings.Split(topology, ","); len(list) > 1 {
		return len(list)
	}
	return 2
}

// topology returns the machines of the question, "" for none, and whether they are only
// declared, as for a program that is started here.
func (e *explainCmd) topology() (text string, declared bool) {
	if e.Topology != "" {
		return e.Topology, false
	}
	text = env.Topology.Text(os.Getenv)
	return text, text != ""
}

// devices finds the GPUs of the question. If this machine has none, it sets q.absent.
func (e *explainCmd) devices(q *question) (err error) {
	switch {
	case e.Backend != "" && e.Device != "":
		return fmt.Errorf("--device is about GPUs, which backend %s does not use: give one of the "+
			"two", e.Backend)
	case e.Backend != "":
		q.absent = fmt.Errorf("backend %s uses none", e.Backend)
	case e.Device == "":
		q.gpus, q.absent = survey(q.ranks)
	default:
		q.gpus = gpu.Survey{Model: e.Device, Link: gpu.FullyConnected}
	}
	q.gpus.Ranks = q.ranks
	if e.Link == "" {
		return nil
	}
	here := q.gpus.Link
	if q.gpus.Link, err = gpu.ParseLink(e.Link); q.gpus.Link != here {
		q.gpus.NVLinks = 0
	}
	return err
}

// survey returns this machine's GPUs, at most one for each rank.
func survey(ranks int) (m gpu.Survey, err error) {
	g, err := openGPUs()
	if err != nil {
		return m, err
	}
	defer func() { err = errors.Join(err, g.close()) }()
	var devices []backend.Device
	for _, c := range g.usable[:min(len(g.usable), ranks)] {
		devices = append(devices, c.device())
	}
	if len(devices) < 2 {
		return m, fmt.Errorf("%d of %d ranks have a GPU here: see euryale doctor", len(devices),
			ranks)
	}
	return gpu.SurveyOf(devices)
}

// calls explains the choice of an algorithm on one machine.
func (e *explainCmd) calls(q question) (string, error) {
	o, err := gpu.Asked(e.LowLatency)
	if err != nil {
		return "", usageError{err}
	}
	if q.absent != nil {
		return e.callsOnHost(q)
	}
	nbytes := operand(q.what.Kind, q.nbytes, q.ranks)
	text, err := q.gpus.Explain(o, q.what, q.dtype, nbytes)
	return strings.TrimRight(text, "\n") + "\n", err
}

// callsOnHost explains the choice without GPUs: of shared memory or of sockets.
func (e *explainCmd) callsOnHost(q question) (text string, err error) {
	topology, declared := e.topology()
	switch engine := cmp.Or(e.Backend, map[bool]string{true: "tcp", false: "host"}[topology != "" &&
		!declared]); engine {
	case "tcp":
		if text, err = tcp.Explain(q.what, q.dtype, q.nbytes, q.ranks); err == nil {
			text = "over sockets (backend tcp): " + text
		}
	case "host":
		text, err = host.Explain(q.what, q.dtype, q.nbytes, q.ranks)
		if errors.Is(err, backend.ErrUnsupported) {
			text, err = fmt.Sprintf("no backend for one machine without GPUs: %v\n", err), nil
		} else if err == nil {
			text = "in shared memory (backend host): " + text
		}
	default:
		return "", usageError{fmt.Errorf("nothing to explain of backend %q: use host or tcp",
			engine)}
	}
	if e.Backend != "" {
		return text, err
	}
	reason, _, _ := strings.Cut(q.absent.Error(), "\n")
	return fmt.Sprintf("%sno GPUs to explain: %s; name some by --device, such as %q\n", text,
		reason, gpu.Shipped()[0].Model), err
}

// plan explains the choice between flat and hierarchical, if there are machines.
func (e *explainCmd) plan(q question) (string, error) {
	topology, declared := e.topology()
	if topology == "" {
		if e.Inside != "" || e.Between != "" || e.Scale {
			return "", usageError{errors.New("--inside, --between and --scale are about " +
				"machines: say which there are by --topology, such as --topology 2x4")}
		}
		return "", nil
	}
	layout, err := hierarchy.Parse(topology, q.ranks)
	if err != nil {
		return "", usageError{err}
	}
	// A declaration is explained for ranks that are all on this machine.
	s := hierarchy.Setting{Layout: layout, Model: cmp.Or(q.gpus.Model, host.Device{}.Name()),
		Declared: declared, Together: declared}
	o, source, err := s.Options(cmp.Or(e.Hierarchy, env.Hierarchy.Text(os.Getenv)))
	if err != nil {
		return "", err
	}
	if !declared {
		if source, err = declaredLinks(s, o.Links, source); err != nil {
			return "", err
		}
	}
	if e.Inside != "" || e.Between != "" {
		source = "as declared"
		if err := e.declareLinks(o.Links, s.Together); err != nil {
			return "", err
		}
	}
	plan, err := hierarchy.NewPlan(layout, o)
	if err != nil {
		return "", err
	}
	plan.Direct = q.absent != nil
	text := plan.Explain(q.what, q.dtype, q.nbytes) + "  links are     " + source + "\n"
	if !e.Scale {
		return text, nil
	}
	scaled, err := e.scale(plan, q)
	return text + scaled, err
}

// declaredLinks replaces links by those measured with EURYALE_TOPOLOGY for the same
// layout, if nothing was measured between real machines. It returns the source of the
// numbers.
func declaredLinks(s hierarchy.Setting, links *hierarchy.Links, source string) (string, error) {
	if _, found, err := hierarchy.Measured(s.Model, s.Layout, false); found || err != nil {
		return source, err
	}
	m, found, err := hierarchy.Measured(s.Model, s.Layout, true)
	if !found || err != nil {
		return source, err
	}
	*links = m.Links
	return "measured: " + m.Source + "; of machines that EURYALE_TOPOLOGY declared", nil
}

// declareLinks replaces links by those of the command line.
func (e *explainCmd) declareLinks(links *hierarchy.Links, together bool) (err error) {
	if e.Inside != "" {
		if links.Inside, err = hierarchy.ParseLink(e.Inside); err != nil {
			return fmt.Errorf("--inside: %w", err)
		}
	}
	if together {
		links.Between = links.Inside
	}
	if e.Between != "" {
		if links.Between, err = parseLink(e.Between, links.Inside); err != nil {
			return fmt.Errorf("--between: %w, or a part of the bandwidth inside, such as 1/10", err)
		}
	}
	return nil
}

// parseLink reads a link. "1/10" is a tenth of the bandwidth of another link.
func parseLink(text string, of hierarchy.Link) (hierarchy.Link, error) {
	if denominator, ok := strings.CutPrefix(text, "1/"); ok {
		if n, err := strconv.ParseFloat(denominator, 64); err == nil && n > 0 {
			return hierarchy.Link{Latency: of.Latency, Bandwidth: of.Bandwidth / n}, nil
		}
	}
	return hierarchy.ParseLink(text)
}
