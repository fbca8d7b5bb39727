package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"net"
	"net/http"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync"
	"text/tabwriter"
	"time"

	tea "charm.land/bubbletea/v2"
	"github.com/dustin/go-humanize"
	"github.com/prometheus/common/expfmt"
	"github.com/prometheus/common/model"
	"github.com/prometheus/procfs"
	"golang.org/x/term"

	"github.com/euryale-ml/euryale/internal/env"
	"github.com/euryale-ml/euryale/observe"
	"github.com/euryale-ml/euryale/rendezvous"
)

// topCmd is "euryale top".
type topCmd struct {
	Address []string      `arg:"" optional:"" help:"HOST:PORT of each rank's metrics, on any machine; if not given, the jobs of this user on this machine."`
	Every   time.Duration `default:"1s" help:"Time between two looks."`
}

// Help says what the one-line help leaves out.
func (*topCmd) Help() string {
	return `A row is a rank: its state, its last step, by how much it is late in a step, which
share of the time it is blocked in collectives, and its memory. An asterisk marks the slowest rank,
with the cause. On a terminal the table is renewed until q or Ctrl-C, elsewhere it is written once.

On Linux, the jobs of this machine are found by the variables of their processes. What /proc does
not say comes from the ranks' metrics: start the job with EURYALE_METRICS=:9090. Ranks that others
can reach ask for a credential, which follows from the EURYALE_TOKEN with which their job was
started; the token is not sent.

Examples:

	euryale top
	euryale top --every 5s 10.0.0.1:9090 10.0.0.1:9091`
}

// Run shows the table.
func (c *topCmd) Run(ctx context.Context, s *streams) error {
	if c.Every <= 0 {
		return usageError{fmt.Errorf("top: --every=%v: the time must be positive", c.Every)}
	}
	for _, address := range c.Address {
		if _, _, err := net.SplitHostPort(address); err != nil {
			return usageError{fmt.Errorf("top: %w: give HOST:PORT", err)}
		}
	}
	out, ok := s.out.(*os.File)
	if !ok || !term.IsTerminal(int(out.Fd())) {
		_, err := io.WriteString(s.out, topView(c.look(ctx)))
		return err
	}
	_, err := tea.NewProgram(topModel{ctx, c.look, c.Every, c.look(ctx)}, tea.WithContext(ctx),
		tea.WithInput(s.in), tea.WithOutput(out), tea.WithoutSignalHandler()).Run()
	return err
}

// topModel is the table on a terminal.
type topModel struct {
	ctx   context.Context
	look  func(context.Context) []rankRow
	every time.Duration
	rows  []rankRow
}

// Init implements [tea.Model].
func (m topModel) Init() tea.Cmd {
	return tea.Tick(m.every, func(time.Time) tea.Msg { return m.look(m.ctx) })
}

// Update implements [tea.Model].
func (m topModel) Update(what tea.Msg) (tea.Model, tea.Cmd) {
	switch what := what.(type) {
	case []rankRow:
		m.rows = what
		return m, m.Init()
	case tea.KeyPressMsg:
		if key := what.String(); key == "q" || key == "esc" || key == "ctrl+c" {
			return m, tea.Quit
		}
	}
	return m, nil
}

// View implements [tea.Model].
func (m topModel) View() tea.View {
	v := tea.NewView(topView(m.rows) + "\npress q to quit\n")
	v.AltScreen = true
	return v
}

// look looks at all ranks: those of addresses, or of this machine.
func (c *topCmd) look(ctx context.Context) (rows []rankRow) {
	for _, address := range c.Address {
		rows = append(rows, rankRow{Rank: -1, address: address,
			credential: env.MetricsCredential(os.Getenv)})
	}
	if len(rows) == 0 {
		rows = localRanks()
	}
	client := &http.Client{Timeout: scrapeTime, // by no proxy, to no other address
		Transport: &http.Transport{DisableKeepAlives: true, MaxResponseHeaderBytes: scrapeBytes},
		CheckRedirect: func(*http.Request, []*http.Request) error {
			return http.ErrUseLastResponse
		}}
	var all sync.WaitGroup
	for i := range rows {
		all.Go(func() {
			if err := rows[i].scrape(ctx, client); err != nil {
				rows[i].Note = "no metrics: " + rendezvous.Printable(err.Error())
			}
		})
	}
	all.Wait()
	return rows
}

const (
	scrapeTime  = 5 * time.Second // that a rank has to answer
	scrapeBytes = 1 << 20         // of its answer, at most
)

// scrape asks a rank for its metrics, and fills the row with them.
func (r *rankRow) scrape(ctx context.Context, client *http.Client) error {
	if r.address == "" {
		return errors.New("EURYALE_METRICS is not set")
	}
	ask, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://"+r.address+"/metrics", nil)
	if err != nil {
		return err
	}
	if r.credential != "" {
		ask.Header.Set("Authorization", "Bearer "+r.credential)
	}
	answer, err := client.Do(ask)
	if err != nil {
		return err
	}
	defer answer.Body.Close()
	if answer.StatusCode != http.StatusOK {
		return fmt.Errorf("%s answers %s", r.address, cell(answer.Status))
	}
	parser := expfmt.NewTextParser(model.LegacyValidation)
	families, err := parser.TextToMetricFamilies(io.LimitReader(answer.Body, scrapeBytes))
	if err == nil && families["euryale_rank_info"] == nil {
		err = fmt.Errorf("%s is not a rank of Euryale", r.address)
	}
	if err != nil {
		return err
	}
	samples, err := expfmt.ExtractSamples(&expfmt.DecodeOptions{},
		slices.Collect(maps.Values(families))...)
	r.fill(samples)
	return err
}

// fill fills the row with what a rank's metrics say.
func (r *rankRow) fill(samples model.Vector) {
	numbers := map[string]*float64{"euryale_step": &r.Step, "euryale_loss": &r.Loss,
		"euryale_lateness_seconds": &r.Late, "euryale_exposed_ratio": &r.Exposed,
		"euryale_caused_exposed_ratio":  &r.Caused,
		"process_resident_memory_bytes": &r.Memory, "euryale_gpu_memory_used_bytes": &r.GPU}
	for _, s := range samples {
		label := func(name model.LabelName) string { return string(s.Metric[name]) }
		name := label(model.MetricNameLabel)
		switch to := numbers[name]; {
		case to != nil:
			*to = float64(s.Value)
		case name == "euryale_rank_state" && s.Value == 1:
			r.State = label("state")
		case name == "euryale_late_cause" && s.Value == 1:
			r.Cause = strings.ReplaceAll(label("cause"), "_", " ")
		case name == "euryale_rank_info":
			r.Job, r.Size = cmp.Or(label("job"), r.Job), label("size")
			if rank, err := strconv.Atoi(label("rank")); err == nil {
				r.Rank = rank
			}
		}
	}
	r.known = true
}

// rankRow is what is known of a rank.
type rankRow struct {
	Job, Size     string // Size is the number of ranks
	Rank          int    // -1 if it is not known
	State, Cause  string
	Step, Loss    float64
	Late, Exposed float64 // seconds a step; a share of the time
	Caused        float64 // the share of all ranks' exposed time
	Memory, GPU   float64 // bytes
	Note          string  // why there is no more

	known               bool   // by its metrics
	address, credential string // "" for none
}

// topView writes jobs as tables.
func topView(rows []rankRow) string {
	var b strings.Builder
	rows = slices.SortedStableFunc(slices.Values(rows), func(a, b rankRow) int {
		return cmp.Or(strings.Compare(a.Job, b.Job), cmp.Compare(a.Rank, b.Rank))
	})
	for from, i := 0, 0; i < len(rows); i++ {
		if i+1 == len(rows) || rows[i+1].Job != rows[i].Job {
			writeJob(&b, rows[from:i+1])
			from = i + 1
		}
	}
	if len(rows) == 0 {
		b.WriteString("no job of yours runs on this machine; euryale top HOST:PORT shows others\n")
	}
	return b.String()
}

// cell is a text of another program in a table.
func cell(text string) string {
	const most = 60 // characters
	text = strings.Join(strings.Fields(rendezvous.Printable(text)), " ")
	if long := []rune(text); len(long) > most {
		text = string(long[:most]) + "..."
	}
	return text
}

// writeJob writes the table of a job.
func writeJob(b *strings.Builder, rows []rankRow) {
	first := slices.MaxFunc(rows, func(a, b rankRow) int { return cmp.Compare(a.Step, b.Step) })
	fmt.Fprintf(b, "%s: %d of %s ranks", cmp.Or(cell(first.Job), "a job"), len(rows),
		cmp.Or(cell(first.Size), "?"))
	if first.known {
		fmt.Fprintf(b, ", step %.0f, loss %.4g", first.Step, first.Loss)
	}
	table := tabwriter.NewWriter(b, 0, 0, 2, ' ', tabwriter.AlignRight)
	fmt.Fprint(table, "\n\tRANK\tSTATE\tSTEP\tLATE\tEXPOSED\tMEMORY\tGPU\t\n")
	slow := slowest(rows)
	for i, r := range rows {
		mark, name, numbers := "", strconv.Itoa(r.Rank), "-\t-\t-"
		if i == slow {
			mark, r.Note = "*", "slowest: "+cmp.Or(cell(r.Cause), "no cause is known")
		}
		if r.Rank < 0 {
			name = cell(r.address)
		}
		if r.known {
			numbers = fmt.Sprintf("%.0f\t%.1f ms\t%.0f %%", r.Step, 1000*r.Late, 100*r.Exposed)
		}
		fmt.Fprintf(table, "%s\t%s\t%s\t%s\t%s\t%s\t  %s\n", mark, name, cmp.Or(cell(r.State), "-"),
			numbers, amount(r.Memory), amount(r.GPU), r.Note)
	}
	_ = table.Flush() // a Builder takes everything
}

// slowest returns the row that is late and that the others wait for most, -1 for none.
func slowest(rows []rankRow) int {
	slow, worst := -1, rankRow{}
	for i, r := range rows {
		if r.Late > 0 && cmp.Or(cmp.Compare(r.Caused, worst.Caused),
			cmp.Compare(r.Late, worst.Late)) > 0 {
			slow, worst = i, r
		}
	}
	return slow
}

// amount writes bytes, "-" for none.
func amount(nbytes float64) string {
	if nbytes == 0 {
		return "-"
	}
	return humanize.Bytes(uint64(nbytes))
}

// localRanks finds this user's ranks on this machine, by the variables of their processes. Of the
// processes that have those of one rank, the largest is it: the others are its shell or its
// children.
func localRanks() []rankRow {
	found := map[string]rankRow{}
	processes, _ := procfs.AllProcs() // none elsewhere than on Linux
	for _, p := range processes {
		if r, ok := rankOf(p); ok {
			key := fmt.Sprint(r.Job, " ", r.Rank)
			if found[key].Memory < r.Memory {
				found[key] = r
			}
		}
	}
	return slices.Collect(maps.Values(found))
}

// rankOf returns the rank that a process is, if it is one of this user's.
func rankOf(p procfs.Proc) (r rankRow, ok bool) {
	status, err := p.NewStatus()
	stat, wrong := p.Stat()
	environ, hidden := p.Environ()
	if errors.Join(err, wrong, hidden) != nil || status.UIDs[0] != uint64(os.Getuid()) {
		return r, false
	}
	set := env.Lookup(environ)
	r.State = map[string]string{"R": "running", "S": "sleeping", "D": "in the kernel",
		"T": "stopped", "t": "stopped", "Z": "ended"}[stat.State]
	r.Job, r.Size = env.Job.Read(set), set("WORLD_SIZE")
	r.Memory = float64(status.VmRSS)
	if r.Rank, err = strconv.Atoi(set("RANK")); err != nil || r.Job == "" {
		return r, false
	}
	local, _ := strconv.Atoi(set("LOCAL_RANK"))
	if at, err := observe.MetricsAddress(env.Metrics.Text(set), local); err == nil {
		host, port, _ := net.SplitHostPort(at)
		ip := net.ParseIP(host)
		if !ip.IsLoopback() { // else it asks for nothing
			r.credential = env.MetricsCredential(set)
		}
		if ip.IsUnspecified() {
			host = "127.0.0.1"
		}
		r.address = net.JoinHostPort(host, port)
	}
	return r, true
}
