package report

import (
	"bytes"
	"cmp"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/euryale-ml/euryale/internal/testing/require"
)

// truth is a job whose times are known: integers of nanoseconds, before clocks are set wrong.
type truth struct {
	group                 string // its name, "" for some
	ranks, steps, buckets int
	ahead                 func(rank int, at int64) int64 // of a clock
	delayed               func(rank, step int) int64     // before the first call of a step
	// by how much a rank that lost its core has noted a start late; may be nil
	notedLate func(rank, call int) int64
	oneShot   bool
	named     string                     // the traces, "trace" without
	bytes     int                        // of a bucket, 4000 of each rank if 0
	slow      string                     // a bucket that takes five times as long
	layer     func(rank, step int) int64 // of h.1, between calls; may be nil
	// after so many steps there are seven calls more, and buckets have numbers; 0: neither
	epoch int
}

// The times of such a job.
const (
	epochStart  = int64(1_795_726_384_000_000_000)
	computation = 2_000_000 // before the first call of a step
	between     = 50_000    // calls
	transfer    = 100_000   // from the last rank's begin to the end
)

// write writes the traces of all ranks.
func (j truth) write(t *testing.T, dir string) {
	t.Helper()
	texts := make([]bytes.Buffer, j.ranks)
	for r := range texts {
		texts[r].WriteString(`{"traceEvents":[{"name":"process_name","ph":"M","pid":0,"tid":0}`)
	}
	seq, at := 0, epochStart
	meet := func(kind, call string, queue, nbytes int, delay func(r int) int64) {
		seq++
		last, transfer := int64(0), int64(transfer)
		if j.slow != "" && strings.Contains(call, j.slow) {
			transfer *= 5
		}
		for r := range j.ranks {
			last = max(last, at+delay(r))
		}
		for r := range j.ranks {
			from, to := at+delay(r), last+transfer
			from, to = from+j.ahead(r, from), to+j.ahead(r, to)
			if j.notedLate != nil {
				from += j.notedLate(r, seq)
				to = max(to, from+100)
			}
			algorithm := ""
			if j.oneShot {
				algorithm = `,"algorithm":"one-shot"`
			}
			fmt.Fprintf(&texts[r], `,{"name":%q,"cat":"collective","ph":"X","ts":%d.%03d,`+
				`"dur":%d.%03d,"pid":%d,"tid":%d,"args":{"bytes":%d,"call":%q,`+
				`"count":%d,"dtype":"f32","group":%[13]q,"rank":%[6]d,"seq":%[11]d%[12]s}}`+"\n",
				kind, from/1000, from%1000, (to-from)/1000, (to-from)%1000, r, queue, nbytes,
				fmt.Sprintf(call, seq), nbytes/4, seq, algorithm,
				cmp.Or(j.group, "run-1"))
		}
		at = last + transfer
	}
	none := func(int) int64 { return 0 }
	meet("allgather", "autograd.New: allgather of 40 u8 (call %d)", 0, 320, none)
	for s := 1; s <= j.steps; s++ {
		for r := range j.ranks {
			if j.layer != nil { // its backward pass in two pieces
				from, busy := at+j.ahead(r, at), j.layer(r, s)
				for _, part := range []int64{busy / 4, busy - busy/4} {
					fmt.Fprintf(&texts[r], `,{"name":"h.1","cat":"layer","ph":"X","ts":%d.%03d,`+
						`"dur":%d.%03[4]d,"pid":0,"tid":1,"args":{"call":"layer h.1","group":%q,`+
						`"rank":%d,"seq":%d,"busy":%d.%03[9]d,"bytes":0,"count":0,"dtype":"f32"}}`,
						from/1000, from%1000, part/1000, part%1000, cmp.Or(j.group, "run-1")+
							", graph 1", r, s, part/1000, part%1000)
				}
			}
		}
		at += computation
		for b := range j.buckets {
			delay := none
			if b == 0 {
				delay = func(r int) int64 { return j.delayed(r, s) }
			}
			call := fmt.Sprintf("DataParallel.Sync: allreduce(avg) of w%d, 1000 f32 (call %%d", b)
			if j.epoch > 0 {
				call += fmt.Sprintf(", bucket %d #751e874f", b)
			}
			meet("allreduce", call+")", 1, cmp.Or(j.bytes, 4000*j.ranks), delay)
			at += between
		}
		meet("allgather", "autograd.Sum: allgather of 24 u8 (call %d)", 0, 24*j.ranks, none)
		for i := range 7 {
			if j.epoch > 0 && s%j.epoch == 0 {
				meet("allgather", fmt.Sprintf("autograd.Evaluation: allgather of %d u8 (call %%d)",
					i), 0, 8*j.ranks, none)
			}
		}
	}
	for r := range texts {
		texts[r].WriteString(`],"displayTimeUnit":"ns"}`)
		put(t, filepath.Join(dir, fmt.Sprintf("%s.%d.json",
			cmp.Or(j.named, "trace"), r)), texts[r].String())
	}
}

// epoch is fit.Epoch, which only programs import.
type epoch struct {
	Epoch, Steps int
	Rate, Loss   float64
	Metrics      map[string]float64
	Best         bool
	Seconds      float64
}

// put writes a file and the directory that it is in.
func put(t *testing.T, path, text string) {
	t.Helper()
	require.NoError(t, os.MkdirAll(filepath.Dir(path), 0o777))
	require.NoError(t, os.WriteFile(path, []byte(text), 0o666))
}

// wholeJob writes what a job with a restart leaves: 8 ranks, of which rank 5 is late by 20 ms in
// each 200th step, and of which rank 3 has been killed in the first attempt.
func wholeJob(t *testing.T, steps int) (dir string, epochs []epoch) {
	t.Helper()
	dir = t.TempDir()
	truth{ranks: 8, steps: steps, buckets: 9,
		ahead: func(rank int, at int64) int64 { return int64(rank) * 7_000_000 },
		delayed: func(rank, step int) int64 {
			if rank == 5 && step%200 == 150 {
				return 20_000_000
			}
			return int64(rank) * 10_000
		}}.write(t, dir)
	var lines strings.Builder
	for e := range 20 {
		x := float64(e + 1)
		epochs = append(epochs, epoch{Epoch: e + 1, Steps: 50 * (e + 1), Rate: 0.5 / x,
			Seconds: 0.25 + x/64,
			Loss:    2.25 / x,
			Metrics: map[string]float64{"accuracy": 1 - 0.5/x, "loss": 2.5 / x}})
		line := require.Value(json.Marshal(epochs[e]))(t)
		lines.Write(append(line, '\n'))
	}
	put(t, filepath.Join(dir, "epochs.jsonl"), lines.String())
	put(t, filepath.Join(dir, "attempt_0", "rank_1.log"), "hello\n"+
		"allreduce(sum) of 3 f32 (call 7): rank 3 is down: signal: killed\n")
	put(t, filepath.Join(dir, "attempt_0", "launcher_0.log"),
		"2026-11-26T20:00:00.000Z started 8 ranks\n"+
			"2026-11-26T20:05:00.000Z rank 3 failed first: signal: killed; its last lines:\n"+
			"    <script>alert(1)</script>\nthen ranks 0, 1 failed or were stopped\n")
	put(t, filepath.Join(dir, "attempt_1", "launcher_0.log"),
		"2026-11-26T20:05:01.500Z started 8 ranks\n2026-11-26T20:10:00.000Z all ranks have ended\n")
	put(t, filepath.Join(dir, "attempt_1", "rank_0.log"),
		"going on after step 400, from ckpt\neuryale: the beginning was repeated by 7 ranks\n"+
			"euryale: step 412 was repeated by 7 ranks: it is "+
			"done 0.03 s after a rank was lost\nepoch 3/20: loss=99\n"+
			"step 500/1000: tokens/s=1250\nstep 1000/1000: tokens/s=1500\n")
	put(t, filepath.Join(dir, "plan.json"), `{"arena_bytes":3000,"beside":{"inputs":500},"steps":[`+
		`{"does":"A × B","bytes":1000},{"does":"relu","bytes":3000},{"does":"loss","bytes":500}]}`)
	return dir, epochs
}
