package elastic

import (
	"container/heap"
	"encoding/json"
	"fmt"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/euryale-ml/euryale/internal/env"
	"github.com/euryale-ml/euryale/internal/scale"
	"github.com/euryale-ml/euryale/internal/testing/require"
)

// crowd is a job of many processes, each alone on its machine, and the launcher that keeps its log.
// It takes what it is asked for in turn; all that it costs is counted.
type crowd struct {
	net     scale.Network
	now     time.Duration
	later   moments
	seq     int
	busy    time.Duration // until when the launcher is
	log     []posting
	waiting []*crowded
	all     []*crowded
	limits  Limits
	connect map[int]int // members that have come to a generation
	cost    scale.Cost
	began   int // the entry of the last decision but one
	decided int
	ends    bool
	failed  error
}

// crowded is a process of a crowd.
type crowded struct {
	p     *Process
	id    ID
	heard int
	timed int
}

// posting is an entry of the log.
type posting struct {
	event Event
	bytes int
}

// moment is when something happens.
type moment struct {
	at  time.Duration
	seq int
	do  func()
}

type moments []moment

func (m moments) Len() int { return len(m) }
func (m moments) Less(i, j int) bool {
	return m[i].at < m[j].at || m[i].at == m[j].at && m[i].seq < m[j].seq
}
func (m moments) Swap(i, j int) { m[i], m[j] = m[j], m[i] }
func (m *moments) Push(x any)   { *m = append(*m, x.(moment)) }
func (m *moments) Pop() any {
	last := (*m)[len(*m)-1]
	*m = (*m)[:len(*m)-1]
	return last
}

func (c *crowd) at(t time.Duration, do func()) {
	c.seq++
	heap.Push(&c.later, moment{t, c.seq, do})
}

// frame has the launcher take or send a message, and returns when it is done.
func (c *crowd) frame(bytes int) time.Duration {
	c.cost.Messages++
	c.cost.Bytes += bytes
	c.busy = max(c.busy, c.now) + scale.PerMessage + c.net.Takes(bytes)
	return c.busy
}

// ask has a process ask the launcher, which does something then, and sends an answer.
func (c *crowd) ask(bytes int, do func() (answer int), then func()) {
	c.at(c.now+c.net.Latency, func() {
		c.at(c.frame(bytes), func() {
			if answer := do(); answer >= 0 {
				c.at(c.frame(answer)+c.net.Latency, then)
			}
		})
	})
}

// write appends to the log, and answers all that wait for it.
func (c *crowd) write(r record) {
	text, _ := json.Marshal(r)
	c.log = append(c.log, posting{r.event(), len(text)})
	waiting := c.waiting
	c.waiting = nil
	for _, p := range waiting {
		c.answer(p)
	}
}

// answer sends a process what is new in the log.
func (c *crowd) answer(p *crowded) {
	first, last, bytes := p.heard, p.heard, 0
	for ; last < len(c.log) && (last == first || bytes+c.log[last].bytes < 1<<20); last++ {
		bytes += 4 + c.log[last].bytes
	}
	c.at(c.frame(scale.Frame+bytes)+c.net.Latency, func() {
		for _, entry := range c.log[first:last] {
			p.heard++
			if entry.event == nil {
				continue
			}
			c.act(p, p.p.Step(entry.event))
			if d, ok := entry.event.(Posted); ok && d.ID == p.id && p.timed < d.Generation+1 {
				p.timed = d.Generation + 1
				c.at(c.now+grace, func() { c.act(p, p.p.Step(GraceOver{d.Generation})) })
				c.at(c.now+time.Minute, func() { c.act(p, p.p.Step(GiveUp{d.Generation})) })
			}
		}
		c.read(p)
	})
}

func (c *crowd) read(p *crowded) {
	c.ask(scale.Frame, func() int {
		if p.heard < len(c.log) {
			c.answer(p)
		} else {
			c.waiting = append(c.waiting, p)
		}
		return -1
	}, nil)
}

func (c *crowd) append(r record) {
	text, _ := json.Marshal(r)
	c.ask(scale.Frame+len(text), func() int { c.write(r); return scale.Frame }, func() {})
}

// propose writes a decision at an entry that a process has not heard, unless it is there.
func (c *crowd) propose(v View, bytes, at int) {
	there := false
	c.ask(scale.Frame+bytes, func() int {
		if at == len(c.log) {
			c.write(record{Decided: &v})
			c.began, c.decided = c.decided, at
			there = true
			return scale.Frame
		}
		_, there = c.log[at].event.(Decided)
		return scale.Frame + c.log[at].bytes
	}, func() {
		if !there {
			c.propose(v, bytes, at+1)
		} else {
			c.ask(scale.Frame, func() int { return scale.Frame }, func() {}) // since when
		}
	})
}

func (c *crowd) act(p *crowded, actions []Action) {
	for _, a := range actions {
		switch a := a.(type) {
		case Revoke:
			c.append(record{Revoked: &a.Generation})
		case Interrupt:
			c.act(p, p.p.Step(Broken{Generation: a.Generation}))
		case Await:
			c.at(c.now+lingerTime, func() { c.act(p, p.p.Step(Lingers(a))) })
		case Live:
			c.append(record{Lives: &Lives{a.Generation, p.id}})
		case Hold:
			c.append(record{Holds: &Holds{a.Generation, p.id}})
		case Probe:
			c.reach(a.View, func() { c.act(p, p.p.Step(Probed{Generation: a.View.Generation})) })
		case Post:
			c.append(record{Posted: &Posted{a.Generation, p.id, a.Position, a.Report}})
		case Propose:
			text, _ := json.Marshal(record{Decided: &a.View})
			c.propose(a.View, len(text), p.heard)
		case Connect:
			c.ask(scale.Frame, func() int { return scale.Frame }, func() { c.meet(a.View) })
			c.reach(a.View, func() { c.meet(a.View) })
		case Stop:
			c.failed = fmt.Errorf("process %v: %v after %v", p.id, a.Why, c.now)
		}
	}
}

// reach has a process ask for the addresses of others, and try to reach them, one after the other.
func (c *crowd) reach(v View, then func()) {
	n := len(v.Members)
	c.ask(scale.Frame+8*n, func() int { return scale.Frame + (scale.Address-8)*n }, func() {
		c.cost.Connections += n - 1
		c.at(c.now+2*c.net.Latency+time.Duration(n-1)*scale.PerConnection, then)
	})
}

// meet has the members of a generation start, once all know where, and have reached each other.
func (c *crowd) meet(v View) {
	if c.connect[v.Generation]++; c.connect[v.Generation] < 2*len(v.Members) {
		return
	}
	start := scale.Start(len(v.Members), 1, c.net)
	c.cost.Messages += start.Messages
	c.cost.Bytes += start.Bytes
	c.cost.Connections += start.Connections
	c.at(c.now+start.Time, func() {
		for _, id := range v.Members {
			c.act(c.all[id-1], c.all[id-1].p.Step(Connected{v.Generation}))
			c.act(c.all[id-1], c.all[id-1].p.Step(CaughtUp{v.Generation}))
		}
		c.steps(v)
	})
}

// steps has the members of a generation do a step, after which they let a replacement in.
func (c *crowd) steps(v View) {
	c.at(c.now+simStep, func() {
		waits := false
		for _, id := range v.Members {
			c.act(c.all[id-1], c.all[id-1].p.Step(Stepped{v.Generation}))
			waits = waits || c.all[id-1].p.Waits()
		}
		switch {
		case v.Generation == 2:
			c.ends = true
			return
		case waits:
			for _, id := range v.Members {
				c.act(c.all[id-1], c.all[id-1].p.Step(Admits{v.Generation}))
			}
			return
		case len(c.all) == c.limits.Most: // the first step without the one that has died
			c.replace(v)
		}
		c.steps(v)
	})
}

// replace starts a replacement, which reads the log one by one.
func (c *crowd) replace(v View) {
	p := &crowded{id: ID(len(c.all) + 1), heard: c.began}
	c.all = append(c.all, p)
	var catchUp func()
	catchUp = func() {
		end := false
		c.ask(scale.Frame, func() int {
			if end = p.heard == len(c.log); end {
				c.write(record{Hello: p.id})
				return scale.Frame
			}
			return scale.Frame + c.log[p.heard].bytes
		}, func() {
			p.heard++
			if !end {
				catchUp()
				return
			}
			var actions []Action
			p.p, actions = NewReplacement(p.id, c.limits, v)
			c.act(p, actions)
			c.read(p)
		})
	}
	catchUp()
}

// recovered is what the death of one of n processes takes until its replacement trains with all
// others: two generations, without the one and with the other.
func recovered(t *testing.T, n int, net scale.Network) scale.Cost {
	t.Helper()
	c := &crowd{net: net, limits: Limits{1, n}, connect: map[int]int{}}
	ids := make([]ID, n)
	for i := range ids {
		ids[i] = ID(i + 1)
	}
	first := First(ids...)
	for _, id := range ids {
		p, _ := NewProcess(id, c.limits, first)
		p.Step(Connected{})
		p.Step(CaughtUp{})
		p.Step(Stepped{})
		c.all = append(c.all, &crowded{p: p, id: id})
	}
	c.waiting = slices.Delete(slices.Clone(c.all), n/2, n/2+1)
	c.write(record{Dead: ids[n/2]})
	for len(c.later) > 0 && !c.ends && c.failed == nil {
		m := heap.Pop(&c.later).(moment)
		c.now = m.at
		m.do()
	}
	require.That(t, c.ends, "%d processes: %v", n, c.failed)
	c.cost.Time = c.now
	return c.cost
}

// TestARecoveryTakesWhatIsPredicted: docs/elastic.md has the table of the simulation.
func TestARecoveryTakesWhatIsPredicted(t *testing.T) {
	page := string(require.Value(os.ReadFile("../../docs/elastic.md"))(t))
	net := scale.Network{Latency: 50 * time.Microsecond, Bandwidth: 1.25e9}
	sizes := []int{32, 256}
	if env.Full.Set(os.Getenv) {
		sizes = append(sizes, 1024, 4096)
	}
	for _, n := range sizes {
		got, want := recovered(t, n, net), scale.Recovery(n, 1, net)
		start := scale.Start(n, 1, net)
		t.Logf("%d: %+v %+v", n, got, want)
		steps := 3 * simStep // of the training, which the prediction does not have
		require.Check(t, near(got.Messages, want.Messages) && near(got.Bytes, want.Bytes) &&
			near(got.Connections, want.Connections) &&
			near(int(got.Time), int(want.Time+steps)),
			"%d processes: %+v, predicted %+v", n, got, want)
		row := fmt.Sprintf("| %d | %d | %.1f | %.2f | %d | %.1f | %.2f |", n, start.Messages,
			float64(start.Bytes)/1e6, start.Time.Seconds(), got.Messages, float64(got.Bytes)/1e6,
			got.Time.Seconds())
		require.Check(t, strings.Contains(page, row), "docs/elastic.md does not say %s", row)
	}
}

// near reports whether a prediction is within a tenth.
func near(got, want int) bool { return 10*max(got-want, want-got) < got }
