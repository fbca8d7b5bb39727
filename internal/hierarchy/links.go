package hierarchy

import (
	"errors"
	"fmt"
	"math"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/tuning"
)

// Link is what a message costs: Latency, and a second for every Bandwidth bytes.
type Link struct {
	Latency   time.Duration `json:"latency_ns"`
	Bandwidth float64       `json:"bytes_per_second"` // of one rank in one direction
}

// time is what nbytes bytes cost in steps messages that wait for each other, in
// nanoseconds.
func (l Link) time(steps int, nbytes float64) float64 {
	return float64(steps)*float64(l.Latency) + nbytes/l.Bandwidth*float64(time.Second)
}

// String prints latency and bandwidth.
func (l Link) String() string { return fmt.Sprintf("%v + %s/s", l.Latency, bytesText(l.Bandwidth)) }

// Links are the speeds on which the choice between flat and hierarchical is based.
type Links struct {
	Inside Link `json:"inside"` // between ranks of one machine
	// between ranks of different machines, each with a share of the network
	Between Link `json:"between"`
	// Step is the time to start a phase and to hand over to the next queue.
	Step time.Duration `json:"step_ns"`
	// Call is the extra time of a hierarchical call over a flat one, beyond what messages and
	// phases explain: if there are more ranks than cores, ranks wake up for each phase in turn.
	Call time.Duration `json:"call_ns,omitempty"`
}

// String prints all of it.
func (l Links) String() string {
	text := fmt.Sprintf("inside %v, between %v, %v for a phase", l.Inside, l.Between, l.Step)
	if l.Call > 0 {
		text += fmt.Sprintf(", %v for a call", l.Call)
	}
	return text
}

// check finds links from which nothing can be predicted.
func (l Links) check() error {
	finite := func(bandwidth float64) bool { return bandwidth > 0 && bandwidth <= math.MaxFloat64 }
	if !finite(l.Inside.Bandwidth) || !finite(l.Between.Bandwidth) || l.Inside.Latency < 0 ||
		l.Between.Latency < 0 || l.Step < 0 || l.Call < 0 {
		return fmt.Errorf("%w: links %v: bandwidths must be positive and finite, and times not "+
			"negative", backend.ErrArgument, l)
	}
	return nil
}

// DefaultLinks returns round numbers for machines with NVLink and one network
// adapter of 200 Gbit/s for each GPU. Measure (euryale bench --tune) or declare your
// own where it matters.
func DefaultLinks() Links {
	return Links{
		Inside:  Link{3 * time.Microsecond, 200e9},
		Between: Link{10 * time.Microsecond, 25e9},
		Step:    5 * time.Microsecond,
	}
}

// Measurement is what was measured on one kind of machines. It is kept in the user's file:
// tuning.json in the directory euryale of the user's cache, or the file that EURYALE_TUNING names.
type Measurement struct {
	Model    string `json:"model"` // of the devices
	Machines int    `json:"machines"`
	Devices  int    `json:"devices"` // 0 if machines differ
	// Declared says that the machines were declared, so they may really be one.
	Declared bool   `json:"declared,omitempty"`
	Links    Links  `json:"links"`
	Source   string `json:"source"` // where the numbers come from
}

// section names the links in the user's file.
const section = "hierarchy"

// Measured returns what was measured on machines of a layout, false if nothing was.
func Measured(model string, l Layout, declared bool) (m Measurement, found bool, err error) {
	all, err := tuning.Read[Measurement](section)
	want := Measurement{Model: model, Machines: l.Machines(), Devices: l.Devices(),
		Declared: declared}
	i := slices.IndexFunc(all, want.replaces)
	if err != nil || i < 0 {
		return m, false, err
	}
	if err := all[i].Links.check(); err != nil {
		path, _ := tuning.Path() // it was read
		return m, false, tuning.Broken(path, err)
	}
	return all[i], true, nil
}

// Keep puts a measurement into the user's file, replacing any of the same machines, and returns the
// name of the file.
func (m Measurement) Keep() (file string, err error) {
	if err := m.Links.check(); err != nil {
		return "", err
	}
	return tuning.Update(section, func(all []Measurement) []Measurement {
		return append(slices.DeleteFunc(all, m.replaces), m)
	})
}

// replaces reports whether two are of the same machines.
func (m Measurement) replaces(other Measurement) bool {
	return m.Model == other.Model && m.Machines == other.Machines && m.Devices == other.Devices &&
		m.Declared == other.Declared
}

// Timed is the time of a call that moves Bytes from each rank, in Steps messages that wait for each
// other.
type Timed struct {
	Steps int
	Bytes float64
	Took  time.Duration
}

// Fit returns the link that explains measured calls best: it minimises the sum of the squared
// errors, each as a share of the measured time.
func Fit(calls []Timed) (Link, error) {
	// Per unit of what was measured: steps x latency + bytes / bandwidth = 1.
	var ss, sb, bb, s, b float64
	for _, t := range calls {
		steps, bytes := float64(t.Steps)/t.Took.Seconds(), t.Bytes/t.Took.Seconds()
		ss, sb, bb, s, b = ss+steps*steps, sb+steps*bytes, bb+bytes*bytes, s+steps, b+bytes
	}
	det := ss*bb - sb*sb
	latency, perByte := (s*bb-b*sb)/det, (b*ss-s*sb)/det
	if latency < 0 {
		latency, perByte = 0, b/bb
	}
	if !(perByte > 0) { // also if nothing tells them apart
		return Link{}, errors.New("the times of calls do not grow with their bytes: measure " +
			"sizes that are further apart")
	}
	return Link{time.Duration(latency * float64(time.Second)).Round(time.Nanosecond), 1 / perByte},
		nil
}

// bandwidths are the units that ParseLink takes.
var bandwidths = []struct {
	unit  string
	bytes float64
}{{"Gbit/s", 1e9 / 8}, {"Mbit/s", 1e6 / 8}, {"GB/s", 1e9}, {"MB/s", 1e6}, {"kB/s", 1e3}, {"B/s", 1}}

// ParseLink reads a latency and a bandwidth, as String writes them: "3us + 200GB/s".
// Networks are sold in "200Gbit/s", which works too.
func ParseLink(text string) (Link, error) {
	wrong := func() (Link, error) {
		return Link{}, fmt.Errorf("%w: link %q: write latency and bandwidth, such as 3us+200GB/s "+
			"or 10us+200Gbit/s", backend.ErrArgument, text)
	}
	latency, bandwidth, _ := strings.Cut(strings.ReplaceAll(text, " ", ""), "+")
	t, err := time.ParseDuration(latency)
	if err != nil || t < 0 {
		return wrong()
	}
	for _, u := range bandwidths {
		digits, ok := strings.CutSuffix(bandwidth, u.unit)
		if !ok {
			continue
		}
		if n, err := strconv.ParseFloat(digits, 64); err == nil && n*u.bytes > 0 {
			return Link{t, n * u.bytes}, nil
		}
		break
	}
	return wrong()
}
