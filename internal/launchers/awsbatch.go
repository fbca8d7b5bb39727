package launchers

import "strings"

// awsBatch is a multi-node parallel job. Its main node, here rank 0, is not told its own address.
// https://docs.aws.amazon.com/batch/latest/userguide/mnp-env-vars.html
func awsBatch() Contract {
	const prefix = "AWS_BATCH_JOB_"
	return Contract{Name: "AWS Batch", Machines: true,
		Rank: counts{prefix + "NODE_INDEX"}, Size: counts{prefix + "NUM_NODES"},
		Meet: prefix + "MAIN_NODE_PRIVATE_IPV4_ADDRESS",
		More: func(v *Vars, p *Position) {
			if main := v.Count(prefix + "MAIN_NODE_INDEX"); main > 0 && p.Rank >= 0 && p.Size > 0 {
				p.Rank = (p.Rank - main + p.Size) % p.Size
			}
			if p.Rank == 0 && p.Addr == "" {
				p.Addr = "0.0.0.0"
			}
			p.Job, _, _ = strings.Cut(v.Text(prefix+"ID"), "#")
			p.Job += "-" + v.Text(prefix+"ATTEMPT")
		}}
}
