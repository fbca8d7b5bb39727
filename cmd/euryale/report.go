package main

import (
	"fmt"
	"path/filepath"

	"github.com/euryale-ml/euryale/internal/files"
	page "github.com/euryale-ml/euryale/observe/report"
	"github.com/euryale-ml/euryale/rendezvous"
)

// reportCmd is "euryale report".
type reportCmd struct {
	Dir   string `arg:"" predictor:"directory" help:"What a job has left: logs of --log-dir, traces, plans, logs of package fit."`
	Out   string `short:"o" placeholder:"FILE" predictor:"file" help:"Where the page goes; DIR/report.html if not given."`
	Trace string `placeholder:"FILE" predictor:"file" help:"Also write the traces of all ranks as one Chrome trace, on one clock."`
}

// Help says what the one-line help leaves out.
func (*reportCmd) Help() string {
	return `The page is one file that needs no network. It shows what the files below DIR say.
Curves come from the files of fit.Log in DIR, or else from lines that rank 0 prints, such as "epoch
3/20: loss=0.0312".

Examples:

	EURYALE_TRACE=logs/trace euryale run -n 2 --log-dir logs ./examples/digits
	euryale report logs                      # makes logs/report.html
	euryale report --trace all.json logs     # and one trace of all ranks, for Perfetto`
}

// Run reads what there is and writes the page.
func (c *reportCmd) Run(s *streams) error {
	job, err := page.Read(c.Dir)
	if err != nil {
		return err
	}
	out, replace := c.Out, files.Replace
	if out == "" { // others may have put a link there
		out, replace = filepath.Join(c.Dir, "report.html"), files.ReplaceHere
	}
	if err := replace(out, job.WriteHTML); err != nil {
		return err
	}
	if c.Trace != "" {
		if err := files.Replace(c.Trace, job.WriteChrome); err != nil {
			return err
		}
	}
	_, err = fmt.Fprintln(s.out, rendezvous.Printable(out))
	return err
}
