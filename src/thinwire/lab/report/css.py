"""The page's style sheet: light, readable from 360 pixels up, and on paper."""

CSS = """
:root{--ink:#1f2328;--muted:#59636e;--line:#dfe3e8;--soft:#f6f8fa;--blue:#0072b2;--good:#116b3f;--bad:#b42318}
*{box-sizing:border-box}
body{margin:0;background:#fff;color:var(--ink);
 font:16px/1.55 -apple-system,"Segoe UI",Roboto,"Helvetica Neue","Liberation Sans",Arial,sans-serif}
main{max-width:66rem;margin:0 auto;padding:2rem 1.25rem 4rem}
.kicker{color:var(--muted);font-size:.9rem;margin:0 0 .6rem}
h1{font-size:clamp(1.3rem,3.4vw,1.9rem);line-height:1.3;margin:0 0 1rem;letter-spacing:-.01em;text-wrap:pretty}
h2{font-size:1.25rem;margin:3rem 0 .8rem;padding-top:1.2rem;border-top:1px solid var(--line)}
p{margin:.5rem 0}
code,pre{font:.88em/1.5 ui-monospace,SFMono-Regular,Menlo,Consolas,"Liberation Mono",monospace}
h1 code{font:inherit;color:var(--blue)}
pre{background:var(--soft);border:1px solid var(--line);border-radius:6px;padding:.8rem 1rem;overflow-x:auto;
 white-space:pre-wrap;overflow-wrap:anywhere;margin:.6rem 0}
.note{border-left:4px solid var(--blue);background:#f2f7fb;padding:.6rem 1rem;border-radius:0 6px 6px 0;margin:1rem 0}
.note.warn{border-color:#c77700;background:#fff8ec}
.cards{display:grid;grid-template-columns:repeat(auto-fit,minmax(9.5rem,1fr));gap:.75rem;margin:1.4rem 0}
.card{border:1px solid var(--line);border-radius:8px;padding:.75rem .9rem}
.card b{display:block;font-size:1.55rem;line-height:1.25;font-weight:650;letter-spacing:-.01em;white-space:nowrap}
.card span{color:var(--muted);font-size:.87rem;line-height:1.35;display:block}
.scroll{overflow-x:auto;margin:.6rem 0;border:1px solid var(--line);border-radius:8px}
table{border-collapse:collapse;width:100%;font-size:.9rem;font-variant-numeric:tabular-nums}
th,td{padding:.45rem .65rem;text-align:right;white-space:nowrap;border-bottom:1px solid var(--line)}
tr:last-child td,tr:last-child th{border-bottom:0}
thead th{background:var(--soft);color:var(--muted);font-weight:600;font-size:.82rem;vertical-align:bottom;
 white-space:normal;line-height:1.3}
.words{text-align:left}
tbody th{position:sticky;left:0;background:#fff;text-align:left;font-weight:600;z-index:1}
thead th:first-child{text-align:left}
tbody small{display:block;color:var(--muted);font-weight:400;font-size:.8rem;line-height:1.35}
tbody th small{white-space:normal;min-width:10rem;max-width:17rem}
tr.main td,tr.main th{background:#f0f7fc}
.dot{display:inline-block;width:.7em;height:.7em;border-radius:2px;margin-right:.45em}
.passes{color:var(--good);font-weight:600}.fails{color:var(--bad);font-weight:600}.untested{color:var(--muted)}
figure{margin:2rem 0 2.4rem}
figure .frame{overflow-x:auto}
figure img{display:block;width:100%;min-width:30rem;height:auto}
figcaption{color:var(--muted);font-size:.92rem;margin:.3rem 0 0 .2rem}
dl{display:grid;grid-template-columns:minmax(9rem,13rem) 1fr;gap:.35rem 1.2rem;margin:.6rem 0}
dt{color:var(--muted)}dd{margin:0;overflow-wrap:anywhere}
.terms dt{color:var(--ink);font-weight:600}
.small{color:var(--muted);font-size:.88rem}
@media(max-width:40rem){main{padding:1.2rem .9rem 3rem}dl{grid-template-columns:1fr;gap:.05rem}
 dd{margin-bottom:.55rem}.card b{font-size:1.3rem}.cards{grid-template-columns:1fr 1fr}
 tbody th small{display:none}}
@media print{main{max-width:none}.scroll,figure .frame{overflow:visible}figure{break-inside:avoid}}
"""
