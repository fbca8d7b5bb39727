package metrics

import (
	"os"
	"strconv"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/env"
	"github.com/euryale-ml/euryale/observe"
	"github.com/euryale-ml/euryale/observe/internal/late"
)

// collector finds out what there is to say when it is asked.
type collector struct {
	watch    *observe.Watch
	comm     backend.Communicator
	options  options
	restarts float64
}

var infoLabels = []string{"machine", "backend", "device", "size", "pid"}

func newCollector(w *observe.Watch, comm backend.Communicator, o options) *collector {
	restarts, _ := strconv.ParseFloat(env.Restarts.Read(os.Getenv), 64)
	return &collector{w, comm, o, restarts}
}

// info returns the values of infoLabels.
func (c *collector) info() []string {
	machine, _ := os.Hostname() // empty if the system does not know
	return []string{machine, c.comm.Capabilities().Backend, c.comm.Device().Name(),
		strconv.Itoa(c.comm.Size()), strconv.Itoa(os.Getpid())}
}

// present returns the collector of the present ranks of an elastic training. It starts no watch: a
// scrape asks one rank, and all ranks or none have a watch.
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

// Describe implements [prometheus.Collector]. What a rank has to say depends on its training.
func (c *collector) Describe(chan<- *prometheus.Desc) {}

// report sends metrics of names, which may have labels.
type report struct {
	to     chan<- prometheus.Metric
	labels []string
}

func (r report) with(labels ...string) report { return report{r.to, labels} }

func (r report) desc(name, help string) *prometheus.Desc {
	return prometheus.NewDesc("euryale_"+name, help, r.labels, nil)
}

func (r report) gauge(name, help string, x float64, values ...string) {
	r.to <- prometheus.MustNewConstMetric(r.desc(name, help), prometheus.GaugeValue, x, values...)
}

func (r report) counter(name, help string, x float64, values ...string) {
	r.to <- prometheus.MustNewConstMetric(r.desc(name, help), prometheus.CounterValue, x, values...)
}

// oneOf reports which of several values holds.
func (r report) oneOf(name, help, label, which string, values ...string) {
	for _, v := range values {
		x := 0.0
		if v == which {
			x = 1
		}
		r.with(label).gauge(name, help, x, v)
	}
}

// Collect implements [prometheus.Collector].
func (c *collector) Collect(to chan<- prometheus.Metric) {
	c = c.present()
	r, p := report{to: to}, c.watch.Progress()
	r.with(infoLabels...).gauge("rank_info", "The rank and its job.", 1, c.info()...)
	r.oneOf("rank_state", "What the rank does.", "state", p.State, observe.States[:]...)
	r.gauge("restarts", "How often the job was restarted.", c.restarts)
	if e := c.options.elastic; e != nil {
		n, took := e.Recoveries()
		r.counter("recoveries_total", "Steps in which a rank was lost.", float64(n))
		r.counter("recovery_seconds_total", "Time from the loss of ranks to the ends of these "+
			"steps.", took.Seconds())
	}
	c.steps(r, &p)
	c.lateness(r, &p)
	c.calls(r)
	if s, ok := c.watch.GPU(); ok {
		r.gauge("gpu_memory_used_bytes", "GPU memory in use, by all programs.",
			float64(s.MemoryUsed))
		r.gauge("gpu_memory_total_bytes", "GPU memory.", float64(s.MemoryTotal))
		r.gauge("gpu_clock_hertz", "Clock of the GPU's multiprocessors.", float64(s.Clock))
		r.gauge("gpu_clock_max_hertz", "The highest clock of the GPU's multiprocessors.",
			float64(s.MaxClock))
		r.counter("gpu_throttled_seconds_total", "Time for which limits of power and of "+
			"temperature have lowered the GPU's clock.", s.Throttled.Seconds())
	}
}

// steps reports what the training has come to.
func (c *collector) steps(r report, p *observe.Progress) {
	r.gauge("step", "Number of the last step in the training.", float64(p.Number))
	r.counter("samples_total", "Samples of this rank.", float64(p.Samples))
	if c.options.tokens > 0 {
		r.counter("tokens_total", "Tokens of this rank.",
			float64(p.Samples)*float64(c.options.tokens))
	}
	r.counter("flops_total", "Floating-point operations of this rank in products, as plans count "+
		"them.", float64(p.FLOPs))
	r.gauge("loader_ready_batches", "Batches that are read ahead.", float64(p.Ready))
	r.gauge("loader_capacity_batches", "How many batches are read ahead at most.",
		float64(p.Capacity))
	if p.Steps > 0 {
		r.gauge("loss", "Loss of the last step, of all ranks.", p.Loss)
		if c.options.peak > 0 {
			r.gauge("mfu_ratio", "Part of the device's peak that the last steps have used.",
				float64(p.StepInfo.FLOPs)/p.Recent.Seconds()/c.options.peak)
		}
	}
	below, count := map[float64]uint64{}, uint64(0)
	for i, n := range p.Buckets {
		count += n
		below[float64(observe.Bound(i).Microseconds())/1e6] = count
	}
	r.to <- prometheus.MustNewConstHistogram(r.desc("step_seconds", "Time of a step."),
		uint64(p.Steps), p.Time.Seconds(), below)
}

// lateness reports how late the rank is, and why.
func (c *collector) lateness(r report, p *observe.Progress) {
	r.gauge("exposed_ratio", "Part of the last steps that the rank stood in collectives.",
		p.Exposed)
	r.gauge("caused_exposed_ratio", "Part of the time in collectives, of all ranks in the last "+
		"steps, that this rank has caused.", p.Caused)
	r.gauge("lateness_seconds", "How much later than the rank in the middle it was in a step, of "+
		"the last ones; 0 if that is no more than usual.", p.Verdict.Late.Seconds())
	r.counter("lateness_seconds_total", "How much later than the rank in the middle it was.",
		p.Late.Seconds())
	which := ""
	if p.Verdict.Late > 0 {
		which = p.Verdict.Cause.String()
	}
	for cause := range late.Causes {
		r.oneOf("late_cause", "1 for the cause of lateness_seconds.", "cause", which,
			cause.String())
	}
	for cause, d := range p.Noted {
		r.with("cause").counter("cause_seconds_total", "What the rank has noted of the causes for "+
			"which ranks may be late.", d.Seconds(), late.Cause(cause).String())
	}
}

// calls reports collectives. There is no bucket where gradients are not exchanged.
func (c *collector) calls(r report) {
	type algorithm struct{ kind, name string }
	type bucket struct{ kind, name string }
	sums, exposed := map[algorithm]observe.Total{}, map[bucket]float64{}
	for k, t := range c.watch.Recorder().Totals() {
		kind, name := k.Kind.String(), ""
		if k.Bucket > 0 {
			name = strconv.Itoa(k.Bucket - 1) // as errors number them
		}
		sum := sums[algorithm{kind, k.Algorithm}]
		sum.Calls, sum.Bytes = sum.Calls+t.Calls, sum.Bytes+t.Bytes
		sums[algorithm{kind, k.Algorithm}] = sum
		exposed[bucket{kind, name}] += t.Exposed.Seconds()
	}
	by := r.with("kind", "algorithm")
	for a, t := range sums {
		by.counter("collectives_total", "Collectives.", float64(t.Calls), a.kind, a.name)
		by.counter("collective_bytes_total", "Bytes of collectives, of the larger operand.",
			float64(t.Bytes), a.kind, a.name)
	}
	for b, seconds := range exposed {
		r.with("kind", "bucket").counter("exposed_seconds_total", "Time in which the rank stood "+
			"in collectives.", seconds, b.kind, b.name)
	}
}
