package metrics

import (
	"os"
	"strconv"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/observe"
	"github.com/euryale-ml/euryale/observe/internal/straggler"
)

// collector computes the metrics when it is asked.
type collector struct {
	watch    *observe.Watch
	comm     backend.Communicator
	options  options
	restarts float64
}

// present returns the collector of the present ranks of an elastic training. It starts no watch: a
// scrape asks one rank, but a watch must be started on all ranks or on none.
func (c *collector) present() *collector {
	if c.options.elastic == nil {
		return c
	}
	now := *c
	if now.comm = c.options.elastic.Comm(); now.comm == nil { // of a machine that is not elastic
		return c
	}
	if now.watch = observe.WatchOf(now.comm); now.watch == nil {
		return c
	}
	return &now
}

// Describe implements [prometheus.Collector]. The metrics of a rank depend on its training.
func (c *collector) Describe(chan<- *prometheus.Desc) {}

// labels of a metric; nil for none.
type labels = prometheus.Labels

// report is where metrics go.
type report chan<- prometheus.Metric

func (r report) gauge(name, help string, x float64, with labels) {
	r <- prometheus.MustNewConstMetric(desc(name, help, with), prometheus.GaugeValue, x)
}

func (r report) counter(name, help string, x float64, with labels) {
	r <- prometheus.MustNewConstMetric(desc(name, help, with), prometheus.CounterValue, x)
}

func desc(name, help string, with labels) *prometheus.Desc {
	return prometheus.NewDesc("euryale_"+name, help, nil, with)
}

// oneOf reports whether a value of a label holds.
func (r report) oneOf(name, help, label, value string, holds bool) {
	x := 0.0
	if holds {
		x = 1
	}
	r.gauge(name, help, x, labels{label: value})
}

// Collect implements [prometheus.Collector].
func (c *collector) Collect(to chan<- prometheus.Metric) {
	c = c.present()
	r, p := report(to), c.watch.Progress()
	machine, _ := os.Hostname() // empty if the system does not know
	r.gauge("rank_info", "The rank and its job.", 1, labels{"machine": machine,
		"backend": c.comm.Capabilities().Backend, "device": c.comm.Device().Name(),
		"size": strconv.Itoa(c.comm.Size()), "pid": strconv.Itoa(os.Getpid())})
	for _, state := range observe.States {
		r.oneOf("rank_state", "What the rank does.", "state", state, state == p.State)
	}
	r.gauge("restarts", "How often the job was restarted.", c.restarts, nil)
	if e := c.options.elastic; e != nil {
		n, took := e.Recoveries()
		r.counter("recoveries_total", "Steps in which a rank was lost.", float64(n), nil)
		r.counter("recovery_seconds_total", "Time from the loss of ranks to the ends of these "+
			"steps.", took.Seconds(), nil)
	}
	c.steps(r, &p)
	c.lateness(r, &p)
	c.calls(r)
	if s, ok := c.watch.GPU(); ok {
		r.gauge("gpu_memory_used_bytes", "GPU memory in use, by all programs.",
			float64(s.MemoryUsed), nil)
		r.gauge("gpu_memory_total_bytes", "GPU memory.", float64(s.MemoryTotal), nil)
		r.gauge("gpu_clock_hertz", "Clock of the GPU's multiprocessors.", float64(s.Clock), nil)
		r.gauge("gpu_clock_max_hertz", "The highest clock of the GPU's multiprocessors.",
			float64(s.MaxClock), nil)
		r.counter("gpu_throttled_seconds_total", "Time for which limits of power and of "+
			"temperature have lowered the GPU's clock.", s.Throttled.Seconds(), nil)
	}
}

// steps reports the progress of the training.
func (c *collector) steps(r report, p *observe.Progress) {
	r.gauge("step", "Number of the last step in the training.", float64(p.Number), nil)
	r.counter("samples_total", "Samples of this rank.", float64(p.Samples), nil)
	if c.options.tokens > 0 {
		r.counter("tokens_total", "Tokens of this rank.",
			float64(p.Samples)*float64(c.options.tokens), nil)
	}
	r.counter("flops_total", "Floating-point operations of this rank in products, as plans count "+
		"them.", float64(p.FLOPs), nil)
	r.gauge("loader_ready_batches", "Batches that are read ahead.", float64(p.Ready), nil)
	r.gauge("loader_capacity_batches", "How many batches are read ahead at most.",
		float64(p.Capacity), nil)
	if p.Steps > 0 {
		r.gauge("loss", "Loss of the last step, of all ranks.", p.Loss, nil)
		if c.options.peak > 0 {
			r.gauge("mfu_ratio", "Part of the device's peak that the last steps have used.",
				float64(p.StepInfo.FLOPs)/p.Recent.Seconds()/c.options.peak, nil)
		}
	}
	below, count := map[float64]uint64{}, uint64(0)
	for i, n := range p.Buckets {
		count += n
		below[float64(observe.Bound(i).Microseconds())/1e6] = count
	}
	r <- prometheus.MustNewConstHistogram(desc("step_seconds", "Time of a step.", nil),
		uint64(p.Steps), p.Time.Seconds(), below)
}

// lateness reports how late the rank is, and why.
func (c *collector) lateness(r report, p *observe.Progress) {
	r.gauge("exposed_ratio", "Part of the last steps that the rank was blocked in collectives.",
		p.Exposed, nil)
	r.gauge("caused_exposed_ratio", "Part of the time in collectives, of all ranks in the last "+
		"steps, that this rank has caused.", p.Caused, nil)
	r.gauge("lateness_seconds", "How much later than the rank in the middle it was in a step, of "+
		"the last ones; 0 if that is no more than usual.", p.Verdict.Late.Seconds(), nil)
	r.counter("lateness_seconds_total", "How much later than the rank in the middle it was.",
		p.Late.Seconds(), nil)
	for cause := range straggler.Causes {
		r.oneOf("late_cause", "1 for the cause of lateness_seconds.", "cause", cause.String(),
			p.Verdict.Late > 0 && cause == p.Verdict.Cause)
	}
	for cause, d := range p.Noted {
		r.counter("cause_seconds_total", "What the rank has noted of the causes for which ranks "+
			"may be late.", d.Seconds(), labels{"cause": straggler.Cause(cause).String()})
	}
}

// calls reports collectives. Calls that do not exchange gradients have no bucket.
func (c *collector) calls(r report) {
	for k, t := range c.watch.Recorder().Totals() {
		of := labels{"kind": k.Kind.String(), "algorithm": k.Algorithm, "bucket": ""}
		if k.Bucket > 0 {
			of["bucket"] = strconv.Itoa(k.Bucket - 1) // as errors number them
		}
		r.counter("collectives_total", "Collectives.", float64(t.Calls), of)
		r.counter("collective_bytes_total", "Bytes of collectives, of the larger operand.",
			float64(t.Bytes), of)
		r.counter("exposed_seconds_total", "Time in which the rank was blocked in collectives.",
			t.Exposed.Seconds(), of)
	}
}
