//! The memory of a run over time, as SVG.

use plotters::prelude::*;

use crate::runs::{RunRecord, TimelinePoint};

/// Width and height in pixels; a page scales it.
const SIZE: (u32, u32) = (860, 260);
const FONT: (&str, i32) = ("sans-serif", 14);
/// Units of the axes: name, and how much it is of bytes or seconds.
const BYTES: [(&str, f64); 4] =
    [("TiB", 1_099_511_627_776.0), ("GiB", 1_073_741_824.0), ("MiB", 1_048_576.0), ("KiB", 1024.0)];
const TIMES: [(&str, f64); 3] = [("hours", 3600.0), ("minutes", 60.0), ("seconds", 1.0)];
/// Of the lines, in this order; they differ also for people who do not see all colours.
const COLORS: [RGBColor; 2] = [RGBColor(0, 92, 197), RGBColor(227, 98, 9)];
const LIMIT_COLOR: RGBColor = RGBColor(207, 34, 46);

/// A line of a graph. A value that was not measured is a gap.
type GraphLine<'a> = (&'a str, fn(&TimelinePoint) -> Option<u64>);

/// Returns the graph of RAM; `None` if none was measured.
pub fn ram(run: &RunRecord) -> Option<String> {
    graph(
        run,
        &[("not reclaimable", |point| point.unreclaimable_bytes)],
        run.limit_bytes.map(|bytes| ("limit", bytes)),
    )
}

/// Returns the graph of the memory of all GPUs; `None` if none was measured.
pub fn vram(run: &RunRecord) -> Option<String> {
    let all = run.gpus.values().map(|gpu| gpu.total_bytes).sum::<Option<u64>>().filter(|bytes| *bytes > 0);
    let lines: [GraphLine<'_>; 2] =
        [("used", |point| point.gpu_bytes), ("reserved by PyTorch", |point| point.torch_reserved_bytes)];
    graph(run, &lines, all.map(|bytes| ("memory of its GPUs", bytes)))
}

fn graph(run: &RunRecord, lines: &[GraphLine<'_>], limit: Option<(&str, u64)>) -> Option<String> {
    let values = |of: fn(&TimelinePoint) -> Option<u64>| run.timeline.iter().filter_map(of);
    let highest = lines.iter().flat_map(|(_, of)| values(*of)).max()? as f64;
    // a limit far above all values would leave them no place
    let limit = limit.filter(|(_, bytes)| *bytes as f64 <= 4.0 * highest);
    let top = limit.map_or(highest, |(_, bytes)| highest.max(bytes as f64)).max(1.0) * 1.08;
    // not the first and the last: the clock may have been set
    let times = || run.timeline.iter().map(|point| point.at);
    let (first, last) = (times().fold(f64::INFINITY, f64::min), times().fold(0.0, f64::max));
    let start = run.subject.started.unwrap_or(first).min(first);
    let end = (run.ended.unwrap_or(last).max(last) - start).max(1.0);
    let (byte_unit, bytes) = unit(&BYTES, top);
    let (time_unit, seconds) = unit(&TIMES, end);
    let scaled = |point: &TimelinePoint, value: u64| ((point.at - start) / seconds, value as f64 / bytes);
    let mut svg = String::new();
    let draw = |svg: &mut String| -> Result<(), Box<dyn std::error::Error>> {
        let area = SVGBackend::with_string(svg, SIZE).into_drawing_area();
        area.fill(&WHITE)?;
        let mut chart = ChartBuilder::on(&area)
            .margin(8)
            .set_label_area_size(LabelAreaPosition::Left, 64)
            .set_label_area_size(LabelAreaPosition::Bottom, 38)
            .build_cartesian_2d(0.0..end / seconds, 0.0..top / bytes)?;
        chart
            .configure_mesh()
            .light_line_style(TRANSPARENT)
            .label_style(FONT)
            .axis_desc_style(FONT)
            .y_desc(byte_unit)
            .x_desc(time_unit)
            .draw()?;
        if let Some((name, limit)) = limit {
            let at = limit as f64 / bytes;
            let line = LineSeries::new([(0.0, at), (end / seconds, at)], LIMIT_COLOR.stroke_width(2));
            chart.draw_series(line)?.label(name).legend(|(x, y)| legend(x, y, LIMIT_COLOR));
        }
        for ((name, of), color) in
            std::iter::zip(lines, COLORS).filter(|((_, of), _)| values(*of).next().is_some())
        {
            let parts = run.timeline.split(|point| of(point).is_none()).filter(|part| !part.is_empty());
            for part in parts {
                let points = part.iter().filter_map(|point| Some(scaled(point, of(point)?)));
                chart.draw_series(LineSeries::new(points, color.stroke_width(2)))?;
            }
            let dots = run
                .timeline
                .iter()
                .filter_map(|point| Some(Circle::new(scaled(point, of(point)?), 2, color.filled())));
            chart.draw_series(dots)?.label(*name).legend(move |(x, y)| legend(x, y, color));
        }
        chart
            .configure_series_labels()
            .label_font(FONT)
            .position(SeriesLabelPosition::LowerRight)
            .background_style(WHITE.mix(0.8))
            .border_style(BLACK.mix(0.2))
            .draw()?;
        area.present()?;
        Ok(())
    };
    match draw(&mut svg) {
        Ok(()) => Some(svg),
        Err(error) => {
            tracing::warn!(%error, run = &*run.run, "drawing the graph of a run failed");
            None
        }
    }
}

fn legend(x: i32, y: i32, color: RGBColor) -> PathElement<(i32, i32)> {
    PathElement::new([(x, y), (x + 16, y)], color.stroke_width(2))
}

/// Returns the largest unit of which a value has at least one and a half, else the smallest.
fn unit(units: &[(&'static str, f64)], value: f64) -> (&'static str, f64) {
    let fits = units.iter().find(|(_, size)| value >= 1.5 * size);
    *fits.or(units.last()).unwrap_or(&("", 1.0))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::export::runs::tests::run;

    #[test]
    fn graph_has_a_gap_where_nothing_was_measured() {
        let mut record = run("train", "32", 4 << 20);
        assert_eq!(ram(&record), None, "no timeline");
        let point = |at: f64, bytes: Option<u64>| TimelinePoint {
            at,
            unreclaimable_bytes: bytes,
            ..TimelinePoint::default()
        };
        let values = [Some(1 << 30), Some(2 << 30), None, Some(3 << 30), Some(1 << 30)];
        record.timeline =
            (0..).zip(values).map(|(minute, bytes)| point(60.0 * f64::from(minute), bytes)).collect();
        (record.subject.started, record.ended) = (Some(0.0), Some(240.0));
        record.limit_bytes = Some(4 << 30);
        let svg = ram(&record).expect("a graph");
        let lines = |color: &str| {
            svg.lines()
                .filter(|line| {
                    line.starts_with("<polyline") && line.contains(color) && line.contains("opacity=\"1\"")
                })
                .count()
        };
        // each with the one of its legend
        assert_eq!((lines("#005CC5"), lines("#CF222E")), (3, 2), "{svg}");
        assert!(svg.contains("GiB") && svg.contains("minutes") && svg.contains("limit"), "{svg}");
        assert_eq!(vram(&record), None, "no GPU");
        record.limit_bytes = Some(1 << 40);
        assert!(!ram(&record).expect("a graph").contains("limit"), "far above");
        record.timeline.truncate(1);
        assert!(ram(&record).expect("one sample").contains("<circle"));
    }
}
